"""Ray's shares of a GPU: what a client has of one, and what is held between requests.

By Flower's backend and a GPU that Ray pretends, in whose processes the pretended
accelerator counts the memory.
"""

import os
import sys
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from virtual import tiny_app, tiny_arrays, travelling

from flwr_fisher.testing import LocalGrid

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
TESTS = str(Path(__file__).parents[1])


def app():
    """Return the clients' app, in a process of Ray's."""
    sys.path.insert(0, TESTS)
    import devices  # first: it registers the device
    import ray
    import torch
    from torch.utils.data import DataLoader
    from virtual import tiny_data, tiny_model

    from flwr_fisher.client import FisherClient, make_client_app

    held = devices.pretended.settled(0)

    def train(model, loader, device, config):
        """Without an optimiser: PyTorch's import what takes seconds in each process."""
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.data -= 0.1 * grad
        return {
            "held-before": held,
            "on-accelerator": int(device.type == devices.ACCELERATOR),
            "gpus": len(ray.get_gpu_ids()),
            "visible": len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")),
            "process": os.getpid(),
        }

    def client_fn(context):
        loader = DataLoader(tiny_data(0), batch_size=4)
        accelerator = devices.ACCELERATOR
        return FisherClient(tiny_model(), loader, train_fn=train, device=accelerator)

    return make_client_app(client_fn)


def test_half_a_gpu_is_one_that_another_has_too_and_its_memory_is_given_back():
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    LocalGrid(tiny_app(), 1)  # messages need the process's identity
    init = {"num_cpus": 2, "num_gpus": 1, "log_to_driver": False}
    resources = {"num_cpus": 1, "num_gpus": 0.5}
    backend = RayBackend({"client_resources": resources, "init_args": init})
    try:
        backend.build(app)
        assert backend.num_workers == 2
        replies = []
        for _ in range(3):  # of one of both processes
            config = ConfigRecord(travelling({"structure": "kfac"}))
            content = RecordDict({"arrays": tiny_arrays(), "config": config})
            context = Context(1, 77, {"partition-id": 0}, RecordDict(), {})
            reply, _ = backend.process_message(Message(content, 77, "train"), context)
            (metrics,) = reply.content.metric_records.values()
            replies.append(metrics)
    finally:
        backend.terminate()
    for told in replies:
        assert (told["gpus"], told["visible"], told["on-accelerator"]) == (1, 1, 1)
    assert len(replies) > len({told["process"] for told in replies})
    assert {told["held-before"] for told in replies} == {0}, replies
