"""A recommendation in a sentence: what to serve a model on, what it costs, and what the next best would cost."""

from collections import Counter
from collections.abc import Sequence

from windtunnel import catalog
from windtunnel.metrics.limits import limits_from
from windtunnel.metrics.summary import SECONDS_PER_HOUR
from windtunnel.report.numbers import number, percent
from windtunnel.report.search.figures import figure_text, figure_title, held_text, limit_text, unit_of
from windtunnel.search.answers import confidence_between, gains_of, present_unless_gain
from windtunnel.search.confidence import CONFIDENCE
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.fleets import FleetSize, alone, fleets, surest
from windtunnel.search.prices import ApiPrice, requests_per_arrival
from windtunnel.search.recommend import AS_IT_IS, CAPACITY, DEPLOYMENT
from windtunnel.search.space.space import CHANGE
from windtunnel.search.study import SearchOutcome, Study
from windtunnel.serving.shorthand import PATHS
from windtunnel.units import format_count, format_seconds


def recommendation(
    study: Study, load: float | None, simulated: Sequence[FleetSize] = (), sure: FleetSize | None = None
) -> str:
    """Say what to serve the model on, for a load or else for the least money a request.

    The next best is another deployment: not the same one with another token budget.

    Args:
        simulated: replicas that take the load, cheapest first; without any they are counted.
        sure: the cheapest that surely take it, where the first of `simulated` may not.
    """
    outcome = study.outcomes[0]
    if CHANGE in study.space.vary:
        text = _changes_text(study, outcome)
        return (
            text if load is None or not outcome.ranking else f"{text} {_enough_text(study, outcome, load, simulated)}"
        )
    ways = simulated or _ways(outcome, load)
    if not ways:
        return nothing_text(study, outcome)
    best, title = ways[0], _name(study, ways[0].index)
    sentences = [f"Serve it {_way_text(study, outcome, best)}"]
    sure_way = sure if simulated or load is None else surest(outcome, load, best)
    if load is not None and sure_way is not None:
        other_name = f" of {study.point(sure_way.index).title}" if sure_way.index != best.index else ""
        what = f"{format_count(sure_way.copies, 'replica')}{other_name}"
        cost = "" if sure_way.usd_per_hour is None else f", for ${sure_way.usd_per_hour:,.2f}/h"
        sentences.append(f"To be {CONFIDENCE:.0%} sure of {number(load)} {unit_of(study.space)}, take {what}{cost}")
    if load is not None and best.copies > 1:
        fewer = f"{format_count(best.copies - 1, 'replica')} {'does' if best.copies == 2 else 'do'} not hold the load"
        is_simulated = best.num_requests is not None
        sentences.append(f"Simulated behind one router, {fewer}" if is_simulated else _COUNTED)
    other = next((way for way in ways if _name(study, way.index) != title), None)
    if other is not None:
        costs = [
            way.usd_per_hour and way.usd_per_hour / (load or outcome.mean(way.index).figures["requests_per_s"])
            for way in (best, other)
        ]
        sentences.append(f"The next best, {_name(study, other.index)}, {_difference_text(*costs)}")
        order = confidence_between(outcome, study.space.objective, best.index, other.index)
        if load is None and order is not None and not outcome.burst(best.index):
            sentences.append(f"Confidence: {certainty(order)}")
    options = {name: value for name, value in study.point(best.index).choice.items() if name != DEPLOYMENT}
    if any(options.values()):
        sentences.append(f"Start it with {', '.join(f'{name} {value}' for name, value in options.items() if value)}")
    if (device := catalog.device(study.point(best.index).settings[PATHS["device"]])).measured_as != device.name:
        sentences.append("No operator was measured on this device, so expect larger errors")
    return ". ".join(sentences) + "."


_COUNTED = "Replicas are counted by what one holds alone, not simulated together: fewer may do, or more be needed"


def nothing_text(study: Study, outcome: SearchOutcome) -> str:
    """Say that no point keeps the limits, and which limit most points break."""
    broken = Counter(answer.limited_by for answer in outcome.evaluations.values() if not answer.refused)
    if not broken:
        return "Nothing tried can run: see the reasons. Try other devices, or more of them."
    (limit, count), tried = broken.most_common(1)[0], broken.total()
    why = limit_text(limit, limits_from(study.space.limits))
    points = f"all {tried} points" if count == tried else f"{count} of {tried} points"
    load = "at the given load" if study.space.load == "given" else "even when hardly anything is sent"
    known = {index: answer.reached_s or answer.figures.get(limit, 0.0) for index, answer in outcome.evaluations.items()}
    reached = {index: at for index, at in known.items() if at and outcome.evaluations[index].limited_by == limit}
    nearest = min(reached, key=lambda index: reached[index], default=None)
    best = (
        "" if nearest is None else f"; nearest is {study.point(nearest).title}, with {format_seconds(reached[nearest])}"
    )
    return f"Nothing tried keeps the limits, {load}: at {points}, {why}{best}. Try other devices, or allow more time."


def against_api(study: Study, api: ApiPrice, load: float | None, simulated: Sequence[FleetSize] = ()) -> str:
    """Say from which load in requests/s one replica costs less than an API, and what both cost for `load`.

    A replica costs the same at any load up to its capacity; the API, by the request. `simulated` is `recommendation`'s.
    """
    outcome, usd_per_request = study.outcomes[0], api.usd_per_request(study.space)
    known = {index: outcome.mean(index).figures for index in outcome.ranking}
    priced = {index: figures for index, figures in known.items() if "usd_per_hour" in figures}
    asks = f"the API asks {_dollars(1000 * usd_per_request)} for 1,000 of these requests"
    if not priced:
        return f"Compared with an API, the price of the devices is needed: {asks}."
    least = {index: each["usd_per_hour"] / SECONDS_PER_HOUR / usd_per_request for index, each in priced.items()}
    paying = {index: rate for index, rate in least.items() if rate < priced[index]["requests_per_s"]}
    if not paying:
        cheapest = min(each["usd_per_hour"] / SECONDS_PER_HOUR / each["requests_per_s"] for each in priced.values())
        return f"The API costs less at any load: {asks}, and the cheapest deployment takes {_dollars(1000 * cheapest)}."
    index = min(paying, key=lambda each: paying[each])
    replica = f"a replica of {_name(study, index)} at ${priced[index]['usd_per_hour']:,.2f}/h"
    text = f"From {number(paying[index])} requests/s on, {replica} costs less than the API: {asks}."
    if load is None:
        return text
    usd_per_hour = load * requests_per_arrival(study.space) * usd_per_request * SECONDS_PER_HOUR
    ways = simulated or _ways(outcome, load)
    own = f" and the replicas ${ways[0].usd_per_hour:,.2f}/h" if ways[0].usd_per_hour is not None else ""
    return f"{text} For {number(load)} {unit_of(study.space)} it asks ${usd_per_hour:,.2f}/h{own}."


def _dollars(amount: float) -> str:
    """Return an amount of money; less than ten cents with three digits."""
    return f"${amount:,.2f}" if amount >= 0.1 else f"${number(amount)}"


def _name(study: Study, index: int) -> str:
    choice = study.point(index).choice
    return str(choice.get(DEPLOYMENT, choice.get(CHANGE, "")))


def _changes_text(study: Study, outcome: SearchOutcome) -> str:
    """Say which single change gains most over the deployment as it is."""
    names = {index: str(study.point(index).choice[CHANGE]) for index in outcome.evaluations}
    present = next(index for index, name in names.items() if name == AS_IT_IS)
    if present not in outcome.ranking:
        why = _why_not(study, outcome, present)
        if not outcome.ranking:
            return f"As it is, {why}, and no change tried mends it."
        held = _held(study, outcome, outcome.ranking[0])
        if study.space.load == "given":
            held += f" for {_cost_text(outcome.mean(outcome.ranking[0]))}"
        return f"{names[outcome.ranking[0]]}: holds {held}. As it is, {why}."
    best = outcome.ranking[0]
    before, after = (outcome.mean(index) for index in (present, best))
    objective, gain, is_given = study.space.objective, gains_of(study, outcome)[best], study.space.load == "given"
    if present_unless_gain(study, outcome) is not None:
        gained = f"more than {percent(gain)}" if gain >= 0.0005 else "anything"
        return f"Leave it as it is: it holds {_held(study, outcome, present)}, and no change tried gains {gained}."
    sure = confidence_between(outcome, objective, best, present)
    same = after.figures["devices"] == before.figures["devices"]
    capacity = "capacity" if same else "capacity per device"
    what = capacity if objective == CAPACITY and not is_given else figure_title(objective)
    devices = [format_count(round(each.figures["devices"]), "device") for each in (after, before)]
    places = ["", ""] if same else [f" on {count}" for count in devices]
    loads = f"{number(after.load)} {unit_of(study.space)}{places[0]} in place of {number(before.load)}{places[1]}"
    if is_given:
        costs = [_cost_text(each) for each in (after, before)]
        loads = f"{costs[0]} in place of {costs[1]}, at {number(after.load)} {unit_of(study.space)}"
    text = f"{names[best]}: +{percent(gain)} {what}, {loads}"
    if outcome.burst(best):
        return f"{text}. It holds {_held(study, outcome, best)}."
    return f"{text}. Confidence: {certainty(sure)}." if sure is not None else f"{text}."


def _cost_text(mean: Evaluation) -> str:
    """Return what a deployment costs at the given load, and its devices: of an autoscaled one those that it holds."""
    price = mean.figures.get("usd_per_hour")
    count = figure_text(mean, "devices")
    devices = f"{count} device{'' if count == '1' else 's'} held"
    return devices if price is None else f"${price:,.2f}/h ({devices})"


def _why_not(study: Study, outcome: SearchOutcome, index: int) -> str:
    """Say why a point holds no load: it cannot run, or breaks a limit even when hardly anything is sent."""
    answer = outcome.evaluations[index]
    if answer.refused:
        return f"it cannot run ({answer.refused.partition(': weights')[0]})"
    load = "at this load" if study.space.load == "given" else "even when hardly anything is sent"
    return f"{limit_text(str(answer.limited_by), limits_from(study.space.limits))} {load}"


def _enough_text(study: Study, outcome: SearchOutcome, load: float, simulated: Sequence[FleetSize]) -> str:
    """Say whether the deployment as it is holds a load, or which change or how many replicas do."""
    asked = f"the {number(load)} {unit_of(study.space)} asked for"
    names = {index: str(study.point(index).choice[CHANGE]) for index in outcome.ranking}
    enough = [index for index in outcome.ranking if outcome.mean(index).load >= load]
    if AS_IT_IS in {names[index] for index in enough}:
        return f"As it is, it holds {asked}."
    if not enough:
        text = f"No single change holds {asked}: it takes"
        if not simulated:
            return f"{text} more replicas."
        way, cost = simulated[0], simulated[0].usd_per_hour
        how = "as it is" if names[way.index] == AS_IT_IS else f"with {names[way.index]}"
        return f"{text} {format_count(way.copies, 'replica')} {how}{'' if cost is None else f', for ${cost:,.2f}/h'}."
    if enough[0] == outcome.ranking[0] and present_unless_gain(study, outcome) is None:
        return f"With it, {asked} are held; as it is, they are not."
    return f"For {asked}, take another: {names[enough[0]]}."


def certainty(share: float) -> str:
    """Return a confidence in words: a few streams never give 100%."""
    return percent(share) if share < 0.999 else "more than 99.9%"


def gain_text(share: float) -> str:
    """Return a gain in percent with its sign; a loss that rounds to nothing is `+0.0%`."""
    return f"{share:+z.1%}"


def _difference_text(best: float | None, other: float | None) -> str:
    """Compare the mean costs of a request; the order goes by what is sure, so that the second may cost less."""
    if not best or not other:
        return "follows"
    more = other / best - 1
    if abs(more) < 0.0005:
        return "costs the same"
    return f"costs {percent(more)} more" if more >= 0 else f"costs {percent(-more)} less in the mean, but less surely"


def _ways(outcome: SearchOutcome, load: float | None) -> list[FleetSize]:
    """Return replicas for the load, the least money first; one copy of each point in their order without a load."""
    if load is not None:
        return fleets(outcome, load, len(outcome.ranking))
    return [alone(outcome, index) for index in outcome.ranking]


def _way_text(study: Study, outcome: SearchOutcome, way: FleetSize) -> str:
    """Return devices, replicas, what they cost and hold, and the checkpoint."""
    settings = study.point(way.index).settings
    device = catalog.device(settings[PATHS["device"]])
    replicas = f" as {way.copies:,} replicas of" if way.copies > 1 else " as"
    cost = "a price that is not known" if way.usd_per_hour is None else f"${way.usd_per_hour:,.2f}/h"
    held, least = _held(study, outcome, way.index, way.load), way.load_at_least
    sure = "" if least is None else f", at least {number(max(least, 0.0))} with {CONFIDENCE:.0%} confidence"
    layout = _name(study, way.index).removeprefix(f"{device.name} ")
    what = f"{way.devices:,} x {device.title}{replicas} {layout} ({settings['model']})"
    return f"on {what}: {cost} holds {held}{sure}"


def _held(study: Study, outcome: SearchOutcome, index: int, load: float | None = None) -> str:
    """Say what a point holds, or its copies together: `load`."""
    mean = outcome.mean(index)
    held = held_text(mean.load if load is None else load, outcome.burst(index), unit_of(study.space))
    if unit_of(study.space) == "clients" and study.space.load == "capacity" and not mean.limited_by:
        return f"{held}, one for each request of the workload (--num-requests gives more)"
    return held
