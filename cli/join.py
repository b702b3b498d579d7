"""`seamlessflow join`: make this machine (or container) part of a cluster whose services run elsewhere.

Writes ``cluster.json`` and ``secrets.json`` into the state folder, which is all that a process needs to
find the others. On one machine `seamlessflow up` does this itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from cli.servers import SEARCH_ATTRIBUTES, TEMPORAL_RETENTION
from storage.errors import ConfigError, DeadlineError
from workers.cluster import ClusterConfig, Secrets, StateFolder

KEY_VARIABLES = {
    "control_key": "SEAMLESSFLOW_CONTROL_KEY",
    "s3_access_key": "SEAMLESSFLOW_S3_ACCESS_KEY",
    "s3_secret_key": "SEAMLESSFLOW_S3_SECRET_KEY",
}
PREPARE_LIMIT_S = 180.0
VALUE_TYPES = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "KeywordList": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD_LIST,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
}


def join(state: StateFolder, config: ClusterConfig) -> None:
    """Write the folder's files; the keys come from the environment (:data:`KEY_VARIABLES`).

    Raises :class:`ConfigError` that names every variable that is missing.
    """
    missing = [variable for variable in KEY_VARIABLES.values() if not os.environ.get(variable)]
    if missing:
        raise ConfigError(
            f"not set in the environment: {', '.join(missing)}; take the values of the cluster's first host"
        )
    keys = Secrets(**{field: os.environ[variable] for field, variable in KEY_VARIABLES.items()})
    state.logs.mkdir(parents=True, exist_ok=True)
    state.write(config, keys)


async def prepare_namespace(config: ClusterConfig) -> None:
    """Register namespace and search attributes with a Temporal server that is not ours; may be repeated.

    Waits for the server and, after registration, until every front end knows the namespace.
    Raises :class:`DeadlineError` after three minutes.
    """
    deadline = time.monotonic() + PREPARE_LIMIT_S
    while True:
        try:
            client = await Client.connect(config.temporal, namespace=config.namespace)
            await _register(client, config.namespace)
            return
        except (RPCError, RuntimeError) as error:  # RuntimeError: no server to connect to yet
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"Temporal at {config.temporal} could not be prepared within {PREPARE_LIMIT_S:.0f} s: {error}"
                ) from error
        await asyncio.sleep(2.0)


async def _register(client: Client, namespace: str) -> None:
    request = RegisterNamespaceRequest(namespace=namespace)
    request.workflow_execution_retention_period.FromTimedelta(timedelta(days=int(TEMPORAL_RETENTION.rstrip("d"))))
    try:
        await client.workflow_service.register_namespace(request)
    except RPCError as error:
        if error.status != RPCStatusCode.ALREADY_EXISTS:
            raise
    attributes = {name: VALUE_TYPES[kind] for name, kind in SEARCH_ATTRIBUTES.items()}
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=namespace, search_attributes=attributes)
        )
    except RPCError as error:
        if error.status != RPCStatusCode.ALREADY_EXISTS:
            raise
