"""docker-compose.yml as Docker's own parser reads it, and the Dockerfile as hadolint does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helm.programs import program, run
from tests.support.processes import ROOT

FILE = ROOT / "docker-compose.yml"
GIVEN = {"POSTGRES_PASSWORD": "pw", "ADMIN_KEY": f"hn_{'0' * 64}"}
ALWAYS = {"postgres", "keys", "migrate", "api", "worker"}
BROKERS = {"rabbitmq", "nats", "kafka", "redis"}


def project(directory: Path, *profiles: str, **env: str) -> dict[str, Any]:
    """The file as Docker understands it, in a directory without an .env."""
    shutil.copy(FILE, directory)
    done = run([program("compose-read"), str(directory / FILE.name), *profiles], **{**GIVEN, **env})
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read


@pytest.mark.parametrize(
    ("profile", "more"),
    [
        ([], set()),
        (["nightly"], {"reconcile"}),
        (["demo"], {"demo"}),
        (["brokers"], BROKERS),
        (["kafka"], {"kafka"}),
        (["rocketmq"], {"rocketmq"}),
        (["nightly", "demo", "brokers"], {"reconcile", "demo", *BROKERS}),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",
)
def test_each_profile_adds_its_own(tmp_path: Path, profile: list[str], more: set[str]) -> None:
    assert project(tmp_path, *profile)["services"].keys() == ALWAYS | more


@pytest.mark.parametrize("missing", sorted(GIVEN))
def test_nothing_starts_with_a_secret_of_somebody_elses(tmp_path: Path, missing: str) -> None:
    shutil.copy(FILE, tmp_path)
    done = run([program("compose-read"), str(tmp_path / FILE.name)], **{**GIVEN, missing: ""})
    assert done.returncode == 1
    assert f"required variable {missing} is missing" in done.stderr


def test_a_wrong_file_would_be_refused(tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_text(FILE.read_text().replace("stop_grace_period", "stop_grace_perriod"))
    done = run([program("compose-read"), str(tmp_path / FILE.name)], **GIVEN)
    assert done.returncode == 1
    assert "stop_grace_perriod" in done.stderr


def test_the_service_waits_for_its_schema_and_is_reached_from_this_machine_alone(tmp_path: Path) -> None:
    services = project(tmp_path)["services"]
    for name in ("api", "worker"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
        assert services[name]["depends_on"]["keys"]["condition"] == "service_completed_successfully"
        assert services[name]["environment"]["HALFNOTE_AUTH"] == "keys"
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert [port["host_ip"] for port in services["api"]["ports"]] == ["127.0.0.1"]
    assert [name for name, service in services.items() if service.get("ports")] == ["api"]


def test_rocketmq_clients_of_this_machine_alone_reach_the_gateway_and_its_route_leads_back(tmp_path: Path) -> None:
    gateway = project(tmp_path, "rocketmq", ROCKETMQ_KEY="hn_shop")["services"]["rocketmq"]
    ports = {port["target"]: f"{port['host_ip']}:{port['published']}" for port in gateway["ports"]}
    assert ports == {8081: "127.0.0.1:8081", 9876: "127.0.0.1:9876"}
    assert f"--remoting-address={ports[9876]}" in gateway["command"]
    assert gateway["environment"]["HALFNOTE_API_KEY"] == "hn_shop"
    # Clients have no rights of the admin by default: the gateway refuses an empty key.
    assert project(tmp_path, "rocketmq")["services"]["rocketmq"]["environment"]["HALFNOTE_API_KEY"] == ""
    assert gateway["depends_on"]["api"]["condition"] == "service_healthy"


def test_the_route_of_a_gateway_for_other_machines_does_not_name_the_address_on_which_it_listens(
    tmp_path: Path,
) -> None:
    listen = {"ROCKETMQ_REMOTING_LISTEN": "0.0.0.0:9876", "ROCKETMQ_REMOTING_ADDRESS": "mq.example:9876"}
    gateway = project(tmp_path, "rocketmq", **listen)["services"]["rocketmq"]
    assert "--remoting-address=mq.example:9876" in gateway["command"]
    [published] = [port["host_ip"] for port in gateway["ports"] if port["target"] == 9876]
    assert published == "0.0.0.0"


def test_only_what_makes_the_sealing_key_may_write_it(tmp_path: Path) -> None:
    services = project(tmp_path)["services"]
    laid = {name: volume for name in ("keys", "migrate", "api", "worker") for volume in services[name]["volumes"]}
    assert {name: volume.get("read_only", False) for name, volume in laid.items()} == {
        "keys": False,
        "migrate": True,
        "api": True,
        "worker": True,
    }
    for name in ("migrate", "api", "worker"):
        assert services[name]["environment"]["HALFNOTE_SECRETS_KEY_FILE"] == f"{laid[name]['target']}/secrets.keys"
        assert services[name]["depends_on"]["keys"]["condition"] == "service_completed_successfully"


def test_what_is_kept_is_found_again_by_a_new_container(tmp_path: Path) -> None:
    services = project(tmp_path, "brokers")["services"]
    for name in ("postgres", *BROKERS):
        assert [volume["type"] for volume in services[name]["volumes"]] == ["volume"], name
    # RabbitMQ's data are those of a node, whose name has the host's in it: Docker would make one up for each container.
    assert services["rabbitmq"]["hostname"] == "rabbitmq"


def test_the_data_of_postgres_is_in_the_volume_with_any_image(tmp_path: Path) -> None:
    """Images up to 17 have their own default of PGDATA, below the volume of the file and in a volume without a name."""
    postgres = project(tmp_path, POSTGRES_IMAGE="postgres:15")["services"]["postgres"]
    assert postgres["image"] == "postgres:15"
    [volume] = postgres["volumes"]
    data = Path(postgres["environment"]["PGDATA"])
    assert data.is_relative_to(volume["target"])
    assert not data.is_relative_to("/var/lib/postgresql/data")
    # Where the image of 18 has put the data of existing volumes.
    assert data == Path("/var/lib/postgresql/18/docker")


def test_callbacks_reach_the_network_of_the_containers(tmp_path: Path) -> None:
    read = project(tmp_path, SUBNET="172.31.5.0/24")
    assert read["networks"]["default"]["ipam"]["config"][0]["subnet"] == "172.31.5.0/24"
    assert read["services"]["worker"]["environment"]["HALFNOTE_ALLOW_NETWORKS"] == "172.31.5.0/24"


def test_our_containers_may_no_more_than_they_need(tmp_path: Path) -> None:
    services = project(tmp_path, "nightly", "demo", "rocketmq")["services"]
    for name in ("keys", "migrate", "api", "worker", "rocketmq", "reconcile", "demo"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = run([program("hadolint"), "--no-color", "--failure-threshold", "style", str(ROOT / "Dockerfile")])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
