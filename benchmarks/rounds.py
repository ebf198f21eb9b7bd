"""Rounds, bytes and gradients to an accuracy: FAGH beside what it is compared with.

    python benchmarks/rounds.py --data-dir DIR   # DIR/MNIST/raw has the files

`--only cost`, `mlr`, `lenet`, `cifar10`, `cnn` or `spectrum` runs a part; the page has
all that were ever run. Finished runs are kept in `benchmarks/cache/rounds`: a programme
that was stopped goes on.

**Setting.** MNIST, 200 clients, 40 % of them a round, batches of at most 512: most
clients' whole data. *MLR* is multinomial logistic regression, 100 rounds, on two
splits: each class shared out by Dirichlet(0.2) over the clients (`dirichlet-class`),
and label shards, two a client (`shards`). *LeNet* is LeNet5 with biases, 50 rounds, on
the Dirichlet split, without GIANT and DONE, which are for convex losses; to save time a
client has at most 100 images of its part. In a seed all methods have the same split,
initial model and cohorts. Clients go without 5000 validation images. *CIFAR-10*
(`DIR/CIFAR10` has the images in folders by class) is LeNet5, too, for 100 rounds on the
Dirichlet split of 15 000 images, with half of the methods. *CNN* is FAGH's, with batch
norms and dropout, on MNIST: at most 30 images a client, 30 rounds, the same methods.

**Limits.** FedAvg and FedProx are Flower's, which limits nobody; nor does any other
method here, as by default: the default cuts what is a thousand times the clients'
median, and no client comes near.

**Again.** Five rounds on MLR's shards by today's code (without GIANT, DONE and FedPM)
are the same to the last digit, but for the probes `random` and `momentum`, whose first
direction is now drawn in another way. So is the order of batches: on the Dirichlet
split, where some clients have several, other methods are up to 2 points away. On
CIFAR-10 the momentum's run of seed 0, in which nobody was cut, is the same to the last
digit as before, when there were limits.

**Hyperparameters** are chosen for each method and split by the mean validation accuracy
over 30 rounds of one seed that is not among the final runs', from six configurations a
method (LeNet: three; CIFAR-10: three, over 40 rounds; CNN: three, over 12); no test
image is looked at. Then the final runs: seeds 0, 2 and 3 (LeNet and CNN: 0 and 2;
CIFAR-10: 0 and 4), since the splits of those between leave a client with a single
image. The steps of FedPM are on a scale of their own: its grids were set after nine
configurations a model were tried for at most eight rounds each, with the same seed and
images.

**Costs.** A *gradient evaluation* is one of a client's whole loss, so a local epoch is
one, too; a pass for a gradient and a Hessian-vector product counts as two (see the
client's cost). In a round, methods whose clients train for E local epochs take E, but
FedGA 2 + E; FAGH takes 2, its momentum alone 1, GIANT 21, DONE 19. FedPM takes 2 + E:
its two passes for the second moments of layers' inputs have no backward pass, but form
a matrix of 785 by 785, and count as one each. *Uploads* are all replies as they are on
the wire, of both exchanges where a method has two.

**Reading, logistic regression.** From 85 % on FAGH needs fewer rounds than FedAvg with
one local step, the other method that looks at each example once a round: to 90 %, 27 to
30 against 45 on the Dirichlet split, and with the better probes 21 against 50 on the
shards. But its momentum alone, H = 0, which costs half, is level with it, and but for
the 90 % on the shards (27) nowhere later: what leads over FedAvg is the server's
momentum. The reason is in the last table: nine eigenvalues of the Hessian, as many as
there are classes less one, are large and alike, and a Hessian of rank one takes out one
of them; the others still bound the step. Methods with five local epochs need fewer
rounds to the first targets, and at equal gradient evaluations they are behind. FedPM
needs the fewest rounds of all to every target on both splits: 12 and 10 to 90 %,
against 17 and 42 of FedAvg with as many local epochs. It pays for them in bytes, 2.5 MB
an upload or 76 times FedAvg's, since the second moment of 785 inputs has nearly eighty
times the model's entries. By gradient evaluations it is the first of the methods with
local epochs on the shards and level with FedAvg's five epochs on the Dirichlet split,
to 90 % behind FedAvg's single step on both. Its advantage is early: its loss falls
little after round 30, on the shards it even rises, and others end lower. GIANT is the
next at 90 % on the Dirichlet split, with 21 gradient evaluations a round.

**Reading, LeNet.** Methods with local epochs lead but for SCAFFOLD, FedExP most of all.
FAGH's better probes and its momentum alone are again close to each other, and by rounds
ahead of one-step FedAvg. Along its last step the loss is often not convex, so that the
momentum probe falls back in most rounds and ends low. SCAFFOLD fails at 0.05, and did
at 0.1, 0.2 and 0.4, which were tried before its grid, and at 0.02 in one of two seeds;
a loop written apart from the library diverges in the same round (at 0.05), as the
control variate of a client with few classes grows without bound. FedPM is by far the
fastest, and what was chosen for it diverges: 0.2 has the best 30 rounds of the choosing
seed and ends in rounds 3 and 2 of the others, where one client's training explodes and
the mixture magnifies it, since a client's weight in a layer grows with the size of its
inputs. Its other two configurations, run on the final seeds for this reading alone,
hold: client_lr 0.1, damping 1 reaches 90 % in round 2 and ends at 93.8 %, client_lr
0.03, damping 0.1 in round 3 and at 95.1 %, which FedExP passes in rounds 28 and 31.

**Reading, CIFAR-10.** By rounds FedExP leads from 25 % on. FAGH is level with FedAvg's
five epochs and FedGA at 20 %, behind them from 25 to 35 %, and has 40.9 % at round 100,
where all but SCAFFOLD and one-step FedAvg have 44. By gradient evaluations it is ahead
of every method with five local epochs at every target, of one-step FedAvg at 20 %
alone, and with 200 of them by 8 points of the next, FedExP, on both seeds. But its
momentum alone, half as dear, needs 21, 40, 54 and 64 where it needs 24, 70, 102 and
130. FAGH's step is the largest that was tried (22.1 in the choosing, 21.0 for the half
of it) and one-step FedAvg's rate the smallest (16.6, and 15.4 for twice of it), so that
either may gain a little from a longer grid. SCAFFOLD comes to 20 % and is at chance
from round 50 on, as the control variates of clients with few classes grow without
bound; where steps were cut at two medians, it ended at 18, and FedExP was faster (10,
16, 25 and 32 rounds, by the rate 0.2, which is behind 0.1 without limits). The two
seeds lie far apart: FAGH ends at 33.5 and 48.3.

**Reading, CNN.** In train mode FAGH needs the fewest gradient evaluations to 60, 80 and
90 % (to 70 % one-step FedAvg needs as few), and with 50 of them it is 2 points ahead of
the next, FedExP. By rounds it is behind the methods with five local epochs at 80 and
90 %, and level with the best after 30. Each round has one forward pass more, which is
not counted, and a second download of the model. In eval mode, as by default, there is
no dropout, and batch norm keeps the statistics that it starts with, so that the CNN
trains as if it had no normalisation: FAGH is last by rounds, and its momentum without a
Hessian, half as dear, is the same curve. Steps of 0.5 and 1 were tried first there and
diverged in rounds 12 and 6 of the choosing; 0.2, the best of the twelve rounds after
which it is chosen, climbs for 23 of the final ones and then falls back from 76 % to 53.
Methods with five local epochs pass 90 % by round 10 to 16, FedExP first. FedAvg's
single step is unsteady: its running statistics lag behind its weights; its rates of 0.4
and 0.8, tried first, stayed at chance. SCAFFOLD is ahead to 70 %, and from 90 % on
behind the others with five epochs. In some of its runs a client's training diverges in
a few rounds: the client says so, and the round goes on without it.
"""

from functools import partial

from harness.jobs import run_all
from harness.page import Page, mnist_folder, opening
from harness.size import sized
from studies.rounds.extras import client_cost, cost_section, spectra, spectrum_section
from studies.rounds.methods import METHODS
from studies.rounds.runs import PARTS, federate, joined, run_part
from studies.rounds.tables import plots, section

PAGE = Page(
    name="rounds",
    opening=opening("Rounds to an accuracy", __doc__),
    sections={
        "cost": cost_section,
        **{part.name: partial(section, part) for part in PARTS.values()},
        "spectrum": spectrum_section,
    },
    plots={part.name: partial(plots, part) for part in PARTS.values()},
)


def main() -> None:
    """Run what is asked for, and write the page of all that was ever run."""
    parser = PAGE.command_line(__doc__)
    parser.add_argument(
        "--method", choices=METHODS, help="run one alone; the others' results stay"
    )
    options = parser.parse_args()
    data_dir = mnist_folder(options)
    run = partial(
        run_all, federate=federate, data_dir=data_dir, workers=options.workers
    )
    names = PAGE.asked(options)
    if options.method:
        names = [n for n in names if n in PARTS and options.method in PARTS[n].methods]
        if not names:
            parser.error(f"--only {options.only} is without {options.method}")
    for name in names:
        if name == "cost":
            PAGE.keep(name, client_cost(data_dir, sized(200, 5)))
        elif name == "spectrum":
            PAGE.keep(name, spectra(data_dir))
        elif name == "cifar10" and not (data_dir / "CIFAR10").exists():
            print(f"left out, as it is not in {data_dir}: CIFAR10")
        else:
            part = PARTS[name]
            methods = [options.method] if options.method else part.methods
            found = run_part(part, methods, run)
            PAGE.keep(name, joined(PAGE.numbers().get(name, {}), found))
    PAGE.write()


if __name__ == "__main__":
    main()
