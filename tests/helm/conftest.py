"""The cluster that the chart is tested on, and a namespace of each test's own."""

import itertools
from collections.abc import Iterator

import pytest

from tests.helm.cluster import Cluster, cluster

_names = itertools.count()


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The run's cluster; tests keep apart by namespaces."""
    with cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.fixture
def space(kube: Cluster) -> Iterator[str]:
    """A namespace of the test's own, in which pods must be as restricted as Kubernetes knows."""
    name = f"space-{next(_names)}"
    kube.kubectl("create", "namespace", name)
    kube.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    kube.kubectl("delete", "namespace", name, "--wait=false")
