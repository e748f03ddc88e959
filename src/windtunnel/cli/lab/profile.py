"""`windtunnel profile`: measure operators, collectives and overheads of this machine, and check the measurements."""

from windtunnel import catalog
from windtunnel.cli.options import quantity
from windtunnel.cli.output import answer, interrupted, remark, status
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known
from windtunnel.formats.nccl_tests import read_nccl_log
from windtunnel.formats.vidur.read import operator_tables
from windtunnel.lab.profile import collectives as lab
from windtunnel.lab.profile import run as profiling
from windtunnel.lab.profile.compute import ComputePlan
from windtunnel.lab.profile.run import fit_overheads, medians_by_batch
from windtunnel.lab.profile.samples import statistics_of
from windtunnel.model.precision import Format, Precision
from windtunnel.pricing.profile import profile_provenance, tables_by_words, write_profile
from windtunnel.pricing.regress import check_methods, scores
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import merged
from windtunnel.report.lab import profile as report
from windtunnel.report.numbers import duration
from windtunnel.schema import fields_of
from windtunnel.units import format_count


def compute(options: Options) -> None:
    """Measure a model's operators inside a real forward."""
    spec = catalog.model(options.model)
    precision = spec.precision
    if options.quant:
        check_known(options.quant, Format, f"--quant: there is no format {options.quant!r}", ", ".join(Format))
        precision = Precision(weights=Format(options.quant), lm_head=Format(options.quant))

    budget = None if options.budget is None else quantity("--budget", "budget_s", options.budget)
    plan = ComputePlan(
        tp=profiling.parse_degrees(options.tp),
        config=catalog.model_config(options.model),
        budget_s=budget,
        **fields_of(options, "engine", "torch_device", "clock", "attention", "tolerance", "overwrite"),
        **fields_of(options, "max_batch", "max_context", "max_tokens"),
    )
    with status() as say:

        def notify(tp: int, num_steps: int, left_s: float | None, expected_error: float) -> None:
            left = "" if left_s is None else f", {duration(left_s)} left"
            worst = "coarse grid" if expected_error >= 1 else f"refining, at most {expected_error:.0%} off"
            say(f"tp {tp}: {format_count(num_steps, 'step')}, {worst}{left}")

        try:
            profile = profiling.profile_compute(spec, precision, options.device_name, options.out, plan, notify)
        except KeyboardInterrupt:
            kept = f"interrupted; {options.out} keeps what was measured"
            raise interrupted(kept, "the same command goes on") from None
    remark(f"wrote {options.out}")
    answer(options, report.compute_document, report.compute_report, profile)


def collectives(options: Options) -> None:
    """Time collectives between real processes."""
    plan = lab.CollectivesPlan(
        tuple(name.strip() for name in options.ops.split(",")),
        profiling.parse_degrees(options.num_workers),
        lab.sizes_between(*_sizes(options.sizes)),
        options.backend or lab.usual_backend(),
        options.workers_per_node,
    )
    with status() as notify:
        timed = (lab.time_collectives_on_ray if options.on_ray else lab.time_collectives)(plan, notify)
    profiling.write_collectives(options.out, options.device_name, plan, timed)
    remark(f"wrote {options.out / 'collective.parquet'}")
    answer(options, report.collectives_document, report.collectives_report, timed)


def overheads(options: Options) -> None:
    """Measure the host's work in a real engine's steps."""
    spec, config = catalog.model(options.model), catalog.model_config(options.model)
    batches = profiling.parse_degrees(options.batches)
    samples = profiling.profile_overheads(spec, config, options.engine, options.device_name, options.out, batches)
    remark(f"wrote {options.out}")
    host, medians = fit_overheads(samples), medians_by_batch(samples)
    answer(options, report.overheads_document, report.overheads_report, host, medians)


def check(options: Options) -> None:
    """Show how far each estimator is off on points of a profile that it was not shown."""
    methods = check_methods(options.estimators.split(",") if options.estimators else None)
    about = profile_provenance(options.folder)
    device_file = options.folder / "device.yaml"
    priced = catalog.device(options.device or (str(device_file) if device_file.is_file() else about["device"]))
    roofline = Roofline(priced, catalog.default_node(priced))
    tables = tables_by_words(options.folder)
    checked = {words: (table, scores(table, roofline, methods)) for words, table in tables.items()}
    answer(options, report.check_document, report.check_report, about, checked)


def from_vidur(options: Options) -> None:
    """Take Vidur's CSV files as a profile."""
    device = options.device_name
    tables = merged([table for file in options.files for table in operator_tables(file, device)])
    write_profile(options.out, tables, {"device": device, "method": "Vidur's profilers"})
    remark(f"wrote {options.out}")
    answer(options, report.tables_document, report.tables_report, tables)


def from_nccl_tests(options: Options) -> None:
    """Take logs of nccl-tests as a profile's collectives."""
    logs = [read_nccl_log(path, options.op) for path in options.logs]
    gpus = sorted({log.gpu for log in logs})
    if len(gpus) > 1:
        raise InputError(f"the logs are of {' and '.join(gpus)}", "a profile is of one device")
    timed = [
        lab.TimedCollective(log.op, log.num_ranks, log.num_hosts, size_bytes, statistics_of([seconds]))
        for log in logs
        for size_bytes, seconds in log.seconds.items()
    ]
    about = {"method": "nccl-tests, out of place", "gpu": gpus[0]}
    profiling.add_collectives(options.out, options.device_name, f"nccl-tests on {gpus[0]}", timed, about)
    remark(f"wrote {options.out / 'collective.parquet'}")
    answer(options, report.collectives_document, report.collectives_report, timed)


def _sizes(text: str) -> tuple[int, int]:
    smallest, dash, largest = text.partition("-")
    if not dash:
        raise InputError(f"--sizes: {text!r} is not a range", "for instance 1KiB-8MiB")
    low, high = (int(quantity("--sizes", "message_bytes", part)) for part in (smallest, largest))
    return low, high
