"""Distributed checkpoints (DCP) written straight to S3 by torch's `async_save`, committed and ordered by `report()`.

The loop is the one from Ray Train's `checkpoint_upload_fn`, with `ray.train` replaced by `ckpt`: `async_save` starts
the upload, and the function that waits for it closes over the loop's future. Run it with

    python examples/dcp_async_save.py s3://bucket/runs

with the usual AWS environment variables (AWS_ENDPOINT_URL for a server of your own), and `pip install
s3torchconnector`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from prefect import flow
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

import ckpt
from ckpt import Checkpoint, CheckpointUploadMode, Result, RunConfig, UploadConfig
from ckpt_tasks import embedded_server, training_run

REGION = os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
CLIENT = S3ClientConfig(force_path_style=True)


@flow(name="dcp-async-save")
def train(storage_path: str, epochs: int = 3) -> Result:
    """Train a tiny model; each epoch's model and optimizer go to S3 as a distributed checkpoint of their own."""
    config = RunConfig(name="dcp", storage_path=storage_path, upload_config=UploadConfig(max_concurrent_uploads=2))
    with training_run(config) as run:
        model = torch.nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        storage = ckpt.get_context().get_storage()
        for epoch in range(epochs):
            loss = train_epoch(model, optimizer)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            uri = f"s3://{storage.build_checkpoint_path_from_name(str(epoch))}"
            writer = S3StorageWriter(region=REGION, path=uri, s3client_config=CLIENT)
            future = dcp.async_save(state, storage_writer=writer, no_dist=True)

            def wait_async_save(checkpoint: Checkpoint, checkpoint_dir: str) -> Checkpoint:
                future.result()
                return checkpoint

            ckpt.report(
                metrics={"loss": loss, "epoch": epoch},
                checkpoint=Checkpoint(uri),
                checkpoint_dir_name=str(epoch),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=wait_async_save,
            )
    assert run.result is not None
    return run.result


def train_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on random data; the loss."""
    optimizer.zero_grad()
    loss = model(torch.randn(64, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def load(uri: str) -> dict[str, object]:
    """Load a checkpoint of `train` again: model and optimizer state, and the epoch."""
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_epoch(model, optimizer)  # gives the optimizer the state that is to be overwritten
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": -1}
    dcp.load(state, storage_reader=S3StorageReader(region=REGION, path=uri, s3client_config=CLIENT), no_dist=True)
    return state


if __name__ == "__main__":
    with embedded_server():
        result = train(sys.argv[1])
    for checkpoint, metrics in result.best_checkpoints:
        print(checkpoint.seq, checkpoint.uri, metrics, "loaded epoch", load(checkpoint.uri)["epoch"])
