"""A real Kubernetes API on loopback, without containers: etcd, kube-apiserver, its controllers and scheduler; nodes and
pods are kwok's, which reports pods as running that are not. Manifests, admission, defaults, rollouts, hooks, garbage
collection and rights are Kubernetes's own; nothing of a container ever runs."""

import contextlib
import datetime
import ipaddress
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.helm.programs import CONTROL_PLANE, CRDS, KUBE, program, require, run
from tests.support.brokers import free_ports

HOST = "127.0.0.1"
_UP_WITHIN_S = 240.0
_NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {
        "name": "n0",
        "annotations": {"kwok.x-k8s.io/node": "fake"},
        "labels": {"kubernetes.io/hostname": "n0", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
    },
    "status": {
        "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "500"},
        "capacity": {"cpu": "64", "memory": "256Gi", "pods": "500"},
    },
}
# Bound to claims by Kubernetes's own controller; a claim that was deleted leaves its volume as it is.
_VOLUMES = [
    {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{number}"},
        "spec": {
            "capacity": {"storage": "200Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/nowhere/{number}"},
        },
    }
    for number in range(40)
]
_CONTROLLERS = "*,-nodeipam,-node-route-controller,-cloud-node-lifecycle-controller"


@dataclass(slots=True)
class Cluster:
    """One cluster, by its API."""

    directory: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def kubeconfig(self) -> str:
        """The administrator's."""
        return str(self.directory / "kubeconfig")

    @property
    def server(self) -> str:
        """The API's URL."""
        config = json.loads(Path(self.kubeconfig).read_text())
        return str(config["clusters"][0]["cluster"]["server"])

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints. Raises AssertionError with what it says if it fails."""
        done = run([program("kubectl"), "--kubeconfig", self.kubeconfig, *arguments], stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def get(self, *what: str) -> Any:
        """Return what `kubectl get` finds, from its JSON."""
        return json.loads(self.kubectl("get", *what, "--output", "json"))

    def helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run helm to its end."""
        home = {f"HELM_{kind}_HOME": str(self.directory / "helm" / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        return run([program("helm"), *arguments], KUBECONFIG=self.kubeconfig, **home)


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster of the caller's own, with the custom resources defined. Skips the test where parts are missing."""
    for name in CONTROL_PLANE:
        program(name)
    require(CRDS, KUBE / "stages.yaml")
    made = Cluster(directory)
    try:
        _start(made)
        yield made
    finally:
        for process in reversed(made.processes):
            process.kill()
            process.wait()


def _start(made: Cluster) -> None:
    place = made.directory
    api, etcd, etcd_peer, controllers, scheduler = free_ports(5)
    _write_identities(place, f"https://{HOST}:{api}")
    there = f"http://{HOST}:{etcd}"
    peer = f"http://{HOST}:{etcd_peer}"
    _run(
        made,
        "etcd",
        f"--data-dir={place}/etcd",
        f"--listen-client-urls={there}",
        f"--advertise-client-urls={there}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    )
    _run(
        made,
        "kube-apiserver",
        f"--etcd-servers={there}",
        f"--bind-address={HOST}",
        f"--advertise-address={HOST}",
        f"--secure-port={api}",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24",
        f"--tls-cert-file={place}/server.crt",
        f"--tls-private-key-file={place}/server.key",
        f"--client-ca-file={place}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={place}/accounts.pub",
        f"--service-account-signing-key-file={place}/accounts.key",
        "--authorization-mode=Node,RBAC",
    )
    _until(made, lambda: _answers(made, "get", "--raw", "/readyz"))
    _run(
        made,
        "kube-controller-manager",
        f"--kubeconfig={made.kubeconfig}",
        f"--service-account-private-key-file={place}/accounts.key",
        f"--root-ca-file={place}/ca.crt",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        f"--bind-address={HOST}",
        f"--secure-port={controllers}",
        f"--controllers={_CONTROLLERS}",
    )
    _run(
        made,
        "kube-scheduler",
        f"--kubeconfig={made.kubeconfig}",
        "--leader-elect=false",
        f"--bind-address={HOST}",
        f"--secure-port={scheduler}",
    )
    _run(
        made,
        "kwok",
        f"--kubeconfig={made.kubeconfig}",
        f"--config={KUBE / 'stages.yaml'}",
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        "--node-lease-duration-seconds=40",
        "--cidr=10.1.0.0/24",
        "--node-ip=10.1.0.1",
    )
    made.kubectl("create", "--filename", "-", stdin=json.dumps(_NODE))
    made.kubectl("create", "--filename", "-", stdin="\n---\n".join(json.dumps(volume) for volume in _VOLUMES))
    made.kubectl("create", "--filename", str(CRDS))
    made.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=120s")
    _until(made, lambda: _answers(made, "get", "serviceaccount", "default"))


def _run(made: Cluster, name: str, *arguments: str) -> None:
    with (made.directory / f"{name}.log").open("wb") as log:
        started = subprocess.Popen(
            [program(name), *arguments],
            cwd=made.directory,
            # Its own home: it writes what it caches there.
            env={**os.environ, "HOME": str(made.directory)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    made.processes.append(started)


def _answers(made: Cluster, *arguments: str) -> bool:
    return run([program("kubectl"), "--kubeconfig", made.kubeconfig, *arguments]).returncode == 0


def _until(made: Cluster, happened: Any) -> None:
    deadline = time.monotonic() + _UP_WITHIN_S
    while not happened():
        ended = [process.args for process in made.processes if process.poll() is not None]
        assert not ended, (ended, *(log.read_text()[-2000:] for log in made.directory.glob("*.log")))
        assert time.monotonic() < deadline, "the cluster did not come up"
        time.sleep(0.3)


def _write_identities(place: Path, server: str) -> None:
    """Write the certificates, the service accounts' key and the administrator's kubeconfig."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    ca = _certificate(ca_name, ca_key.public_key(), ca_name, ca_key, None)
    _write(place / "ca.crt", ca)
    for name, common, organization, usage in (
        ("server", "kube-apiserver", None, ExtendedKeyUsageOID.SERVER_AUTH),
        ("admin", "admin", "system:masters", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
        if organization:
            names.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        _write(place / f"{name}.key", key)
        _write(place / f"{name}.crt", _certificate(x509.Name(names), key.public_key(), ca_name, ca_key, usage))
    accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write(place / "accounts.key", accounts)
    (place / "accounts.pub").write_bytes(
        accounts.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": server, "certificate-authority": f"{place}/ca.crt"}}],
        "users": [
            {
                "name": "admin",
                "user": {"client-certificate": f"{place}/admin.crt", "client-key": f"{place}/admin.key"},
            }
        ],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
    }
    (place / "kubeconfig").write_text(json.dumps(config))
    (place / "kubeconfig").chmod(0o600)


def _certificate(
    subject: x509.Name, public: Any, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey, usage: Any
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if usage is ExtendedKeyUsageOID.SERVER_AUTH:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _write(file: Path, what: Any) -> None:
    if isinstance(what, x509.Certificate):
        file.write_bytes(what.public_bytes(serialization.Encoding.PEM))
        return
    file.touch(0o600)
    file.write_bytes(
        what.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
