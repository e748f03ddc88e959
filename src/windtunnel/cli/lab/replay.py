"""`windtunnel lab replay`: a training job's communication, carried out on this machine."""

from windtunnel.cli.options import assignments, quantity
from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.formats.collective_calls import Contents
from windtunnel.lab.replay import replay
from windtunnel.report.workload import contents_document, contents_report
from windtunnel.training.job import load
from windtunnel.training.setup import resolve
from windtunnel.units import format_bytes, format_count


def command(options: Options) -> None:
    """Carry out the communication of a job's step, and show the collectives of a rank."""
    largest = quantity("--largest-message", "message_bytes", options.largest_message)
    done = replay(resolve(load(options.job, assignments(options.settings))), int(largest))
    facts = (
        ("ranks", f"{format_count(done.num_ranks, 'process', 'processes')}, gloo"),
        ("checked", f"{format_count(done.num_checked, 'result')}, all right"),
        ("cut", f"messages above {format_bytes(done.largest_bytes)} carried a part of their data"),
        ("shown", "rank 0, one step, times of this machine"),
    )
    contents = Contents("replay", facts, done.calls)
    checked = {"num_checked": done.num_checked}
    answer(options, lambda replayed: contents_document(replayed) | checked, contents_report, contents)
