"""The program this project began with: DCP `async_save` in the loop, its future awaited by the upload function."""

import random
import threading

import pytest
from helpers import make_config
from servers import S3Server, moto_server, rclone_server  # noqa: F401 - fixtures

import ckpt
from ckpt import Checkpoint, CheckpointUploadMode, open_run

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

EPOCHS = 3
BUCKET = "seed"


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The bucket on the server that the test names."""
    server: S3Server = request.getfixturevalue(request.param)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # torch's own would stay with another server
    client = server.client()
    client.create_bucket(Bucket=BUCKET)
    client.close()
    return BUCKET


class S3Connector:
    """The writer and reader of s3torchconnector."""

    @staticmethod
    def writer(uri: str):
        connector = pytest.importorskip("s3torchconnector.dcp")
        return connector.S3StorageWriter(region="us-east-1", path=uri, s3client_config=S3Connector._client())

    @staticmethod
    def reader(uri: str):
        connector = pytest.importorskip("s3torchconnector.dcp")
        return connector.S3StorageReader(region="us-east-1", path=uri, s3client_config=S3Connector._client())

    @staticmethod
    def _client():
        return pytest.importorskip("s3torchconnector").S3ClientConfig(force_path_style=True)


class Fsspec:
    """The writer and reader that torch ships."""

    @staticmethod
    def writer(uri: str):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(uri, sync_files=False)

    @staticmethod
    def reader(uri: str):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(uri)


@pytest.mark.parametrize(
    ("s3", "kind"),
    [("moto_server", S3Connector), ("moto_server", Fsspec), ("rclone_server", Fsspec)],
    indirect=["s3"],
    ids=["s3torchconnector-moto", "fsspec-moto", "fsspec-rclone"],
)
def test_async_save_in_the_loop_with_its_future_awaited_by_the_upload_function(s3, kind):
    """Two slots, jittered uploads: three checkpoints with their own metrics, and each loads with DCP."""
    weights = {}
    jitter = random.Random(0)
    with open_run(make_config(f"s3://{s3}/{kind.__name__}", upload={"max_concurrent_uploads": 2})) as run:
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        storage = ckpt.get_context().get_storage()
        for epoch in range(EPOCHS):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            weights[epoch] = model.weight.detach().clone()
            uri = f"s3://{storage.build_checkpoint_path_from_name(str(epoch))}"
            future = dcp.async_save(state, storage_writer=kind.writer(uri), no_dist=True)
            pause = jitter.random() / 5

            def wait_async_save(checkpoint, checkpoint_dir):
                threading.Event().wait(pause)  # noqa: B023 - uploads end in another order; bound at the call
                future.result()  # noqa: B023 - the loop's future, as the program had it
                return checkpoint

            ckpt.report(
                metrics={"epoch": epoch, "loss": loss.item()},
                checkpoint=Checkpoint(uri),
                checkpoint_dir_name=str(epoch),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=wait_async_save,
            )
    assert run.result is not None
    assert [metrics["epoch"] for _, metrics in run.result.best_checkpoints] == list(range(EPOCHS))
    for checkpoint, metrics in run.result.best_checkpoints:
        blank = torch.nn.Linear(8, 2)
        loaded = {"model": blank.state_dict(), "epoch": -1}
        dcp.load(loaded, storage_reader=kind.reader(checkpoint.uri), no_dist=True)
        assert loaded["epoch"] == metrics["epoch"]
        assert torch.equal(loaded["model"]["weight"], weights[metrics["epoch"]])


@pytest.mark.parametrize("s3", ["moto_server"], indirect=True)
def test_a_checkpoint_whose_shard_is_missing_is_not_committed(s3, moto_server):  # noqa: F811
    """A resolved DCP future is no proof: what `.metadata` refers to must be there, and the missing file is named."""

    def lossy(checkpoint, name):
        dcp.save({"w": torch.zeros(100)}, storage_writer=Fsspec.writer(checkpoint.uri), no_dist=True)
        client = moto_server.client()
        for item in client.list_objects_v2(Bucket=s3, Prefix=checkpoint.path.removeprefix(f"{s3}/"))["Contents"]:
            if item["Key"].endswith(".distcp"):
                client.delete_object(Bucket=s3, Key=item["Key"])
        client.close()
        return checkpoint

    with open_run(make_config(f"s3://{s3}/lossy", failure_policy=ckpt.FailurePolicy(red_on="nothing"))) as run:
        uri = ckpt.get_context().get_storage().build_checkpoint_uri_from_name("a")
        record = ckpt.report({}, Checkpoint(uri), "a", checkpoint_upload_fn=lossy).wait(60)
        good = ckpt.get_context().get_storage().build_checkpoint_uri_from_name("b")
        state = {"w": torch.zeros(100)}
        dcp.save(state, storage_writer=Fsspec.writer(good), no_dist=True)
        run.report({}, Checkpoint(good), "b", CheckpointUploadMode.NO_UPLOAD)
    assert record.state is ckpt.ReportState.FAILED
    assert ".distcp, which is missing" in str(record.reason)
    assert run.result is not None
    assert [row.state.value for row in run.result.history] == ["failed", "committed"]
