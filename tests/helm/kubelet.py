"""A node whose pods do run: what the API has bound to it is started by podman, on this machine's own network, each with
a loopback address of its own.

As much of a kubelet as a pod of the nightly proof needs: command, arguments, environment, volumes, user, rights, the
service account's token, and what becomes of it all as the pod's status. No probes, no limits, no init containers.
"""

import base64
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.helm.cluster import Cluster
from tests.support.containers import LIMITS, RUNTIME, attempt, call

Json = dict[str, Any]
_ROOM = {"cpu": "8", "memory": "32Gi", "pods": "20"}


def add_node(kube: Cluster, name: str) -> None:
    """Add a node without a kubelet, for pods that tolerate every taint.

    The API taints a new node as not ready, and its controllers remove that taint a moment later. Without a taint of its
    own the node would then get pods of others, such as the migration, and no kubelet starts them.
    """
    status = {"allocatable": _ROOM, "capacity": _ROOM}
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
    spec = {"taints": [{"key": "tests/real", "effect": "NoSchedule"}]}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": status}
    kube.kubectl("create", "--filename", "-", stdin=json.dumps(node))


@dataclass(slots=True)
class Kubelet:
    """The pods of one node, by their names; `directory` has their files and the claims' volumes."""

    kube: Cluster
    node: str
    directory: Path
    started: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def turn(self) -> None:
        """Start what is new, report what has ended, and remove what is to go."""
        found = self.kube.get("pod", "--all-namespaces", "--field-selector", f"spec.nodeName={self.node}")["items"]
        for pod in found:
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            elif name not in self.started:
                self._start(pod)
            elif name not in self.ended:
                self._look(pod)

    def logs(self) -> str:
        """What the containers said, each to its end."""
        return "\n".join(self.log(name) for name in self.started)

    def log(self, pod: str) -> str:
        """What a pod said."""
        said = attempt("podman", "logs", "--tail=60", self.started[pod])
        return f"{pod}:\n{said.stdout}{said.stderr}"

    def close(self) -> None:
        """Remove every container."""
        for container in self.started.values():
            attempt("podman", "rm", "--force", "--time=0", container)

    def _start(self, pod: Json) -> None:
        name, [container] = pod["metadata"]["name"], pod["spec"]["containers"]
        known = self._environment(pod, container)
        self.started[name] = f"halfnote-test-{pod['metadata']['uid']}"
        command = ["podman", "--runtime", RUNTIME, "run", "--network=host", "--detach", *LIMITS]
        command += [f"--name={self.started[name]}", *_rights(pod, container)]
        command += [f"--env={variable}={value}" for variable, value in known.items()]
        command += self._mounts(pod, container)
        if "command" in container:
            command.append(f"--entrypoint={json.dumps(_expanded(container['command'], known))}")
        call(*command, container["image"], *_expanded(container.get("args", []), known))
        self._report(pod, "Running", {"running": {}})

    def _look(self, pod: Json) -> None:
        name = pod["metadata"]["name"]
        state, status = call(
            "podman", "inspect", "--format={{.State.Status}} {{.State.ExitCode}}", self.started[name]
        ).split()
        if state == "exited":
            self.ended[name] = int(status)
            phase = "Failed" if self.ended[name] else "Succeeded"
            self._report(pod, phase, {"terminated": {"exitCode": self.ended[name]}})

    def _remove(self, pod: Json) -> None:
        name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
        if name in self.started:
            attempt("podman", "stop", "--time=10", self.started[name])
        self.ended.setdefault(name, 0)
        # Another one may have been first.
        gone = ["delete", "pod", name, "--namespace", space, "--grace-period=0", "--force", "--ignore-not-found"]
        self.kube.kubectl(*gone)

    def _report(self, pod: Json, phase: str, state: Json) -> None:
        [container] = pod["spec"]["containers"]
        container_status = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        status = {
            "phase": phase,
            "podIP": self._address(pod),
            "podIPs": [{"ip": self._address(pod)}],
            "containerStatuses": [{**container_status, "ready": phase == "Running", "state": state}],
        }
        patch = ["patch", "pod", pod["metadata"]["name"], "--namespace", pod["metadata"]["namespace"]]
        self.kube.kubectl(*patch, "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))

    def _environment(self, pod: Json, container: Json) -> dict[str, str]:
        api = urlsplit(self.kube.server)
        known = {"KUBERNETES_SERVICE_HOST": str(api.hostname), "KUBERNETES_SERVICE_PORT": str(api.port)}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = self._secret(pod, source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]].decode()
            elif "fieldRef" in source:
                value = self._field(pod, source["fieldRef"]["fieldPath"])
            else:
                [value] = _expanded([variable.get("value", "")], known)
            known[variable["name"]] = value
        return known

    def _secret(self, pod: Json, name: str) -> dict[str, bytes]:
        data = self.kube.get("secret", name, "--namespace", pod["metadata"]["namespace"])["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    def _secret_files(self, pod: Json, volume: Json) -> dict[str, bytes]:
        found = self._secret(pod, volume["secretName"])
        items = volume.get("items", [{"key": key, "path": key} for key in found])
        return {one["path"]: found[one["key"]] for one in items}

    def _mounts(self, pod: Json, container: Json) -> list[str]:
        places = {volume["name"]: self._volume(pod, volume) for volume in pod["spec"].get("volumes", [])}
        return [
            f"--volume={places[mount['name']] / mount.get('subPath', '')}:{mount['mountPath']}"
            f":{'ro' if mount.get('readOnly') else 'rw'}"
            for mount in container.get("volumeMounts", [])
        ]

    def _volume(self, pod: Json, volume: Json) -> Path:
        """Return the directory of a volume, with the files that it brings; all may be written by the pod's group."""
        space = pod["metadata"]["namespace"]
        if "persistentVolumeClaim" in volume:
            place = self.claim(space, volume["persistentVolumeClaim"]["claimName"])
        else:
            place = self.directory / pod["metadata"]["uid"] / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        for name, content in self._files(pod, volume).items():
            (place / name).write_bytes(content)
        group = str(pod["spec"]["securityContext"]["fsGroup"])
        call("chgrp", "-R", group, str(place))
        call("chmod", "-R", "g+rwX", str(place))
        return place

    def claim(self, space: str, name: str) -> Path:
        """Return where a claim's files are."""
        return self.directory / "claims" / f"{space}-{name}"

    def _files(self, pod: Json, volume: Json) -> dict[str, bytes]:
        if "configMap" in volume:
            return self._config_map(pod, volume["configMap"])
        if "secret" in volume:
            return self._secret_files(pod, volume["secret"])
        found: dict[str, bytes] = {}
        for source in volume.get("projected", {}).get("sources", []):
            if "serviceAccountToken" in source:
                whose = ["create", "token", pod["spec"]["serviceAccountName"]]
                token = self.kube.kubectl(*whose, "--namespace", pod["metadata"]["namespace"])
                found[source["serviceAccountToken"]["path"]] = token.strip().encode()
            elif "configMap" in source:
                found |= self._config_map(pod, source["configMap"])
            else:
                found |= {
                    one["path"]: self._field(pod, one["fieldRef"]["fieldPath"]).encode()
                    for one in source["downwardAPI"]["items"]
                }
        return found

    def _field(self, pod: Json, path: str) -> str:
        if path == "status.podIP":
            return self._address(pod)
        assert path in ("metadata.name", "metadata.namespace"), path
        return str(pod["metadata"][path.removeprefix("metadata.")])

    def _address(self, pod: Json) -> str:
        """Return a pod's own address: pods that share one count as on one machine and read each other's files."""
        name = pod["metadata"]["name"]
        return self.addresses.setdefault(name, f"127.0.1.{len(self.addresses) + 1}")

    def _config_map(self, pod: Json, source: Json) -> dict[str, bytes]:
        data = self.kube.get("configmap", source["name"], "--namespace", pod["metadata"]["namespace"])["data"]
        named = {one["key"]: one["path"] for one in source.get("items", [])} or {key: key for key in data}
        return {path: data[key].encode() for key, path in named.items()}


def _rights(pod: Json, container: Json) -> list[str]:
    user, own = pod["spec"]["securityContext"], container["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"]["drop"] == ["ALL"]
    return [
        f"--user={user['runAsUser']}:{user['runAsGroup']}",
        f"--group-add={user['fsGroup']}",
        *("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges"),
    ]


def _expanded(words: list[str], known: dict[str, str]) -> list[str]:
    """Words with `$(NAME)` as Kubernetes reads it: what is not known stays as it is."""
    return [re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), word) for word in words]
