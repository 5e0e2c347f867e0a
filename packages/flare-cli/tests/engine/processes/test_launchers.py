"""torchrun starts a group by one command line, and ends it by its own signal."""

import shutil
import signal
import subprocess
import sys

import pytest


@pytest.mark.skipif(shutil.which("torchrun", path=f"{sys.prefix}/bin") is None, reason="torchrun is not installed")
def test_torchrun_places_the_ranks(make_ranks):
    ranks = make_ranks(disk=False)
    key = ranks.root / "cluster.key"
    key.touch(mode=0o600)
    key.write_text("5a" * 32 + "\n")
    command = [f"{sys.prefix}/bin/torchrun", "--nproc-per-node", "2", "--master-port", str(ranks.rendezvous)]
    command += ["--no-python", sys.executable, "-m", "flare_cli"]
    command += ["run", str(ranks.model), "--key-file", str(key), "--port", str(ranks.port)]
    command += ["--prefix-cache-disk", str(ranks.root / "records{rank}")]
    with (ranks.root / "rank0.log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    ranks.processes[0] = launcher
    ranks.wait_ready()
    assert ranks.cluster()["world_size"] == 2
    ranks.complete("hello")
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(60)
    log = ranks.log(0)
    assert "rank zero has ended the group" in log
    assert "is lost" not in log
    assert all((ranks.root / f"records{rank}" / "set.json").exists() for rank in (0, 1))
