"""Collectives between the ranks of one machine through shared memory: ``cpu_transport: auto | shm``."""

from autopar.registry import Feature

FEATURE = Feature(
    name="host_transport",
    about="collectives on the CPU through shared memory",
    transports={"shm": "autopar.features.host_transport.transport:choose_transport"},
)
