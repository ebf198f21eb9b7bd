"""Two clients at a time on one GPU, by Flower's backend and a GPU that Ray pretends.

    python tests/accelerator/sharing.py     # prints what they saw, as JSON

Its processes load the pretended accelerator, whose memory is counted before each
request.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def app():
    """Return the clients' app, in a process of Ray's."""
    import devices  # first: it registers the device
    import ray
    from torch.utils.data import DataLoader
    from virtual import tiny_data, tiny_model

    from flwr_fisher.client import FisherClient, LocalSGD, make_client_app

    class Telling(LocalSGD):
        def __call__(self, model, loader, device, config, **options):
            trained = super().__call__(model, loader, device, config, **options)
            seen = {
                "held-before": held,
                "on-accelerator": int(device.type == devices.ACCELERATOR),
                "gpus": len(ray.get_gpu_ids()),
                "visible": len([*filter(None, visible().split(","))]),
                "process": os.getpid(),
            }
            return trained | seen

    held = devices.pretended.settled(0)

    def client_fn(context):
        loader = DataLoader(tiny_data(0), batch_size=4)
        return FisherClient(tiny_model(), loader, train_fn=Telling())

    return make_client_app(client_fn)


def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES", "none is hidden")


def main():
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from virtual import tiny_app, tiny_arrays, travelling

    from flwr_fisher.testing import LocalGrid

    LocalGrid(tiny_app(), 1)  # messages need the process's identity
    init = {"num_cpus": 2, "num_gpus": 1, "log_to_driver": False}

    def ask(backend, partition):
        config = ConfigRecord(travelling({"structure": "kfac"}))
        content = RecordDict({"arrays": tiny_arrays(), "config": config})
        context = Context(1, 77, {"partition-id": partition}, RecordDict(), {})
        reply, _ = backend.process_message(Message(content, 77, "train"), context)
        (metrics,) = reply.content.metric_records.values()
        return dict(metrics)

    resources = {"num_cpus": 1, "num_gpus": 0.5}
    backend = RayBackend({"client_resources": resources, "init_args": init})
    backend.build(app)
    with ThreadPoolExecutor(2) as pool:
        replies = [*pool.map(partial(ask, backend), range(6))]
    told = {"workers": backend.num_workers, "replies": replies}
    backend.terminate()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
