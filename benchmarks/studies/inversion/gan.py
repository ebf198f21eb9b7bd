"""A small generator of 28x28 images, trained on what the server has."""

import torch
import torch.nn.functional as F
from harness.size import sized
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

LATENT, STEPS, BATCH = 64, sized(3000, 3), 64


def generator() -> nn.Module:
    """Return a network from latent codes to images in [0, 1]."""
    return nn.Sequential(
        nn.Linear(LATENT, 64 * 7 * 7),
        nn.ReLU(),
        nn.Unflatten(1, (64, 7, 7)),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1),
        nn.Sigmoid(),
    )


def discriminator() -> nn.Module:
    """Return a network from images to a score, high for real ones."""
    return nn.Sequential(
        spectral_norm(nn.Conv2d(1, 32, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Conv2d(32, 64, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        spectral_norm(nn.Linear(64 * 7 * 7, 1)),
    )


def trained_gan(images: Tensor, steps: int = STEPS) -> tuple[nn.Module, nn.Module]:
    """Train both with the hinge loss; return them, ready to be differentiated through.

    Parameters
    ----------
    images : Tensor
        ``[n, 1, 28, 28]``, in [0, 1].
    steps : int
        Of each network.
    """
    G, D = generator(), discriminator()
    of_G = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.99))
    of_D = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.99))
    for _ in range(steps):
        real = images[torch.randint(len(images), (BATCH,))]
        fake = G(torch.randn(BATCH, LATENT))
        loss = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake.detach())).mean()
        of_D.zero_grad()
        loss.backward()
        of_D.step()
        of_G.zero_grad()
        (-D(fake).mean()).backward()
        of_G.step()
    for network in (G, D):
        network.eval().requires_grad_(False)
    return G, D
