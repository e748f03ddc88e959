"""The result of a serving run: records, summary, and the setup that decided them."""

from dataclasses import dataclass, field

import msgspec

from windtunnel import catalog
from windtunnel.metrics.records import Table
from windtunnel.metrics.summary import ServiceLimits, Summary
from windtunnel.metrics.uncertainty import Interval
from windtunnel.notebook import Shown
from windtunnel.pricing.estimator import Coverage
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.setup.fleet_plan import FleetRecord
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.units import format_count, format_seconds
from windtunnel.workload.generate.requests import RequestArrays


@dataclass(frozen=True, eq=False)
class Result(Shown):
    """A finished run: `.summary` has latencies, throughput and cost; `.requests` and `.steps` are tables.

    `wt.compare`, `wt.save` and a notebook take it whole; `.intervals` has the 80% intervals, `.scenario` every default.
    """

    REPORT = "serving.run:run_report"

    scenario: Scenario
    """Resolved: every default that decided the result is filled in."""
    setup: Setup
    memory: MemoryPlan
    requests: Table
    steps: Table
    summary: Summary
    coverage: dict[Coverage, float]
    """Coverage of the operator times -> share of the device's time."""
    sources: dict[str, float]
    """Measured table or fit -> share of the device's time that it prices."""
    operators: dict[str, float]
    """Operator, as `windtunnel explain` names it -> share of the device's time."""
    engine_time_s: float
    """Wall time of the simulation loop alone."""
    intervals: dict[str, Interval] = field(default_factory=dict)
    """Metric (`tpot`, `ttft`, `e2e`, `throughput`) -> interval in which 80% of measurements are expected."""
    calibration_remarks: tuple[str, ...] = ()
    """Differences between the setup and the runs of its calibration."""
    pools: tuple["PoolResult", ...] = ()
    """Empty where all replicas are equal; else `setup` and `memory` are those of the first pool."""
    fleet: FleetRecord | None = None
    """None where all replicas are there all the time."""
    trace_remarks: tuple[str, ...] = ()
    """How the requests differ from the rows of their trace: rows left out and why, lengths changed."""

    def __repr__(self) -> str:
        """Return one line for a notebook, which would print thousands of numbers for the records."""
        summary, rate = self.summary, self.summary.throughput
        tpot = "" if summary.tpot_s is None else f", TPOT {format_seconds(summary.tpot_s.mean)}"
        return (
            f"Result({self.scenario.model_name} on {summary.num_devices:,} x {self.scenario.deployment.device}: "
            f"{format_count(summary.num_requests, 'request')}, mean TTFT {format_seconds(summary.ttft_s.mean)}{tpot}, "
            f"{rate.output_tokens_per_s:,.0f} output tokens/s; see .summary, .requests, .steps)"
        )


@dataclass(frozen=True, eq=False)
class PoolResult:
    """Setup and memory of one pool of a finished run."""

    name: str
    role: str
    setup: Setup
    memory: MemoryPlan


def limits_of(scenario: Scenario, requests: RequestArrays) -> ServiceLimits:
    """Return the scenario's limits, and those of its tenants in the order of their numbers."""
    by_name = {tenant.name: tenant.slo for tenant in scenario.workload.tenants}
    return ServiceLimits(scenario.slo, {name: by_name.get(name) for name in requests.tenant_names})


def resolved_scenario(scenario: Scenario, setup: Setup, memory: MemoryPlan) -> Scenario:
    """Write out in `scenario` the defaults that decided the result; names of files stay as given."""
    engine = msgspec.structs.replace(
        setup.engine, max_model_len=setup.max_model_len, num_gpu_blocks=memory.num_blocks or None
    )
    assumed = None if setup.node.name == catalog.SWITCHED_NODE else setup.node.name
    node = scenario.deployment.node or assumed
    deployment = msgspec.structs.replace(scenario.deployment, node=node, engine=engine)
    workload = msgspec.structs.replace(scenario.workload, sampling=setup.sampling)
    return msgspec.structs.replace(scenario, precision=setup.precision, deployment=deployment, workload=workload)
