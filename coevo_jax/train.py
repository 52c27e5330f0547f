"""The loop: runs a list of Stages over a run folder, readable from top to bottom. It knows no method by name.

For each stage and update: make a batch (sample, judge, reward), update the stage's role, publish its weights to the sampler,
write the rollouts, then the metrics row, then now and then a checkpoint. A kill costs the updates since the last checkpoint;
they are done again and their rows come out equal (design.md 4.8).

Several processes run this loop together (distributed.py): each makes the batch of its own prompt slots and writes their rollouts;
they meet in the update and in checkpoints; process 0 writes the metrics row and speaks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from time import perf_counter
from typing import Any

import jax

from coevo_jax.assemble import assemble
from coevo_jax.config import Experiment
from coevo_jax.config.override import to_dict
from coevo_jax.distributed import any_process, barrier, own, to_first
from coevo_jax.evaluate.during import Evaluation
from coevo_jax.learn.control import alarms
from coevo_jax.methods.stage import Batch, Behind, Stage, Step
from coevo_jax.progress import RunConsole
from coevo_jax.records.checkpoint import Checkpoints
from coevo_jax.records.facts import Facts
from coevo_jax.records.metrics import MetricsWriter
from coevo_jax.records.profile import Profile
from coevo_jax.records.rollouts import drop_rollouts_after, write_rollouts
from coevo_jax.records.run_folder import RunFolder, check_run, open_run
from coevo_jax.records.stopping import stop_on_signals
from coevo_jax.records.tensorboard import Scalars
from coevo_jax.records.wandb_view import WandbView
from coevo_jax.startup import check_processes
from coevo_jax.system import System
from coevo_jax.watchdog import Watchdog


@dataclasses.dataclass
class Position:
    """Where the run stands; all of it is in the checkpoint."""

    stage: int = 0
    done: int = 0  # updates of this stage that are finished
    updates: int = 0
    policy_updates: dict[str, int] = dataclasses.field(default_factory=dict)  # by policy


@dataclasses.dataclass
class Run:
    """A run in progress: what it works with, where it stands, and where it writes (metrics: process 0 alone)."""

    system: System
    position: Position
    folder: RunFolder
    checkpoints: Checkpoints
    metrics: MetricsWriter | None
    views: tuple[Scalars | WandbView, ...]
    console: RunConsole
    watchdog: Watchdog
    stop: threading.Event
    profile: Profile
    evaluation: Evaluation
    saved: int = 0  # updates in the last checkpoint


def train(cfg: Experiment, workdir: str, console: RunConsole | None = None, watchdog: Watchdog | None = None) -> bool:
    """Run the experiment in `workdir`, going on where an earlier run of this config stopped. False: it was interrupted."""
    console, watchdog, first = console or RunConsole(), watchdog or Watchdog(), jax.process_index() == 0
    if first:
        check_run(workdir, to_dict(cfg))
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(console.note, "finishing this update, then saving"))
        with watchdog.meeting("assemble"):  # what is wrong with the config shows here, before anything is written
            system = assemble(cfg, console, watchdog=watchdog)
            evaluation = Evaluation(system)
        folder = stack.enter_context(
            open_run(workdir, to_dict(cfg), primary=first, inputs=system.inputs,
                     allow_changed_inputs=cfg.run.allow_changed_inputs)
        )  # fmt: skip
        with watchdog.meeting("start"):
            barrier("folder")
            check_processes(system, folder)
        for line in folder.changed:
            console.note(f"warning: an input changed since the run began, as allowed: {line}")
        checkpoints = Checkpoints(folder.checkpoints, keep=cfg.run.keep)
        stack.callback(checkpoints.close)
        metrics = MetricsWriter(folder.metrics) if first else None
        stack.callback(system.close)
        system.open_caches(folder.path)
        with watchdog.meeting("restore"):
            position = _restore(system, checkpoints, metrics, console, evaluation)
        if first:
            drop_rollouts_after(folder.rollouts, position.updates - 1)
        with watchdog.meeting("prepare"):
            if not system.prepare(folder.path, position.updates, stop.is_set):
                return False
        scalars = Scalars(folder.path / "tensorboard", cfg.run.tensorboard and first, position.updates)
        wandb = WandbView(folder.path, cfg.run.wandb if first else "off", cfg.run.wandb_project, to_dict(cfg))
        profile = Profile(folder.path, cfg.run.profile)
        for view in (scalars, wandb, profile):
            stack.callback(view.close)
        run = Run(system, position, folder, checkpoints, metrics, (scalars, wandb), console, watchdog, stop, profile,
                  evaluation, position.updates)  # fmt: skip
        finished = _run(run)
        if first:
            console.summary(folder.path, finished)
        return finished


def _run(run: Run) -> bool:
    system, position, console, watchdog = run.system, run.position, run.console, run.watchdog
    total = sum(stage.updates for stage in system.stages)
    with watchdog.meeting("publish"):
        for learner in system.learners.values():
            learner.publish()
    while position.stage < len(system.stages):
        stage = system.stages[position.stage]
        learner = system.learner_of(stage.role)
        with watchdog.meeting("begin cycle"):
            system.begin_cycle(stage.cycle, console)
        if position.done == 0:
            with watchdog.meeting("begin stage"):
                _begin_stage(system, stage, run.checkpoints)
        console.stage(stage.name, stage.cycle, stage.updates, position.updates, total)
        best = False
        while position.done < stage.updates:
            watchdog.at("begin update", position.updates)
            with watchdog.meeting("begin update"):
                stop = any_process(run.stop.is_set())
            if stop:
                if position.updates != run.saved:
                    _save(run, block=True)
                return False
            start = perf_counter()
            age = position.policy_updates.get(stage.policy, 0)
            step = Step(position.updates, age, stage.cycle, stage.role, stage.policy, position.done)

            # ------------------------------------------------------------------------------------------- make a batch
            run.profile.before(step.update)
            console.mark("batch", step.update)
            watchdog.at("batch")
            batch = stage.make_batch(system.context, step)
            with system.context.timed("check"):
                system.check_frozen()  # before anything learns from its verdicts

            # ------------------------------------------------------------------------------------------- update
            console.mark("update", step.update)
            watchdog.at("update")
            with system.context.timed("update"), watchdog.meeting("update"):
                learned = {"update/skipped": 1.0}
                if any_process(bool(batch.samples)):
                    temperature = system.temperature(stage)
                    learned = learner.update(batch.samples, stage.loss, temperature, stage.most) | {"update/skipped": 0.0}
                for part in batch.then:  # further optimizer steps on what was made together
                    more = {"update/skipped": 1.0}
                    if any_process(bool(part.samples)):
                        other = system.learner_of(part.role)
                        more = other.update(part.samples, stage.loss, part.temperature) | {"update/skipped": 0.0}
                    learned |= {f"{part.name}/{name}": value for name, value in more.items()}
            with system.context.timed("publish"), watchdog.meeting("publish"):
                if stage.loss != "none":
                    learner.publish()
                for role in {part.role for part in batch.then if system.learner_of(part.role) is not learner}:
                    system.learner_of(role).publish()

            # ------------------------------------------------------------------------------------------- write it down
            watchdog.at("write")
            if batch.rollouts and step.update % system.cfg.run.rollouts_every == 0:
                write_rollouts(run.folder.rollouts, step.update, stage.role, batch.rollouts, jax.process_index())
                for part in batch.then:
                    write_rollouts(run.folder.rollouts, step.update, part.role, part.rollouts, jax.process_index())
            with watchdog.meeting("metrics"):
                row, behind = _row(system, stage, step, batch, learned, perf_counter() - start)
            row |= run.evaluation.look(step.update + 1, total)
            position.done += 1
            position.updates += 1
            position.policy_updates[stage.policy] = age + stage.counts_as_policy
            if run.metrics is not None:
                run.metrics.write(row)
                for view in run.views:
                    view.write(row)
                console.update(row, position.updates)
                console.alarms(row, behind, system.cfg.control)
                console.completions(batch.rollouts, step.update, system.cfg.run)
            if written := run.profile.after(step.update, system.program_memory):
                console.note(f"profiler trace and memory of programs: {written}")
            best = run.evaluation.improved(row, position.updates)
            if (best or position.updates % system.cfg.run.save_every == 0) and position.done < stage.updates:
                _save(run)
        if run.metrics is not None:
            console.end_stage(run.folder.metrics, stage.name, stage.cycle)
        position.stage, position.done = position.stage + 1, 0
        last = position.stage == len(system.stages)
        if last or best or position.updates - run.saved >= system.cfg.run.save_every:
            _save(run, block=last)
    for learner in system.learners.values():
        learner.weights()  # those of the last update, from which nothing was drawn
    return True


def _begin_stage(system: System, stage: Stage, checkpoints: Checkpoints) -> None:
    """The first stage that needs the reference anchors it: the weights as they are now, once a run. A stage may ask for a fresh
    optimizer."""
    if stage.fresh:
        system.learner_of(stage.role).fresh_optimizer()
        system.learner_of(stage.role).publish()
    if stage.loss != "policy":
        return
    for learner in system.learners.values():
        if not learner.anchored:
            learner.anchored = True
            learner.fresh_optimizer()
            if system.cfg.loss.kl_weight > 0:
                checkpoints.save_reference(learner.state.params, f"reference_{learner.name}")
                learner.take_reference(checkpoints.load_reference(learner.state.params, f"reference_{learner.name}"))
            learner.publish()


def _row(
    system: System, stage: Stage, step: Step, batch: Batch, learned: dict[str, float], seconds: float
) -> tuple[dict[str, Any], Behind]:
    """The metrics row of an update, on process 0: of what every process counted; and the rows behind its metrics. Times are those
    of the slowest process."""
    around, parts = system.take_sampler_facts(), system.context.seconds
    system.context.seconds = {}
    for name, value in parts.items():
        around.add("most", f"time/{name}", [value])
    for endpoint in system.endpoints.values():
        for name, value in endpoint.take_stats().items():
            around.total(name, value)
    every = to_first("facts", [batch.facts.state(), around.state(), batch.behind.rows])
    behind = Behind()
    for state in every:
        behind.join(state[2])
    made, counted = (Facts.joined(states[i] for states in every).row() for i in (0, 1))
    row: dict[str, Any] = {"step": step.update, "cycle": step.cycle, "role": step.role, "stage": stage.name}
    row |= {"policy": step.policy} if system.cfg.policies else {}
    row |= {"policy_updates": step.policy_updates, **made, **learned, **counted, "time/total": seconds}
    if counted.get("time/sample"):
        row["sampler/tokens_per_second"] = counted["tokens/sampled"] / counted["time/sample"]
    if system.compat:
        row["compat"] = ",".join(system.compat)
    row |= {alarm.name: float(alarm.on) for alarm in alarms(row, system.cfg.control)}
    return row, behind


# ------------------------------------------------------------------------------------------------------- save and resume


def _save(run: Run, block: bool = False) -> None:
    """Everything that the next update depends on, in one atomic checkpoint (design.md 4.8)."""
    system, position, streams = run.system, run.position, run.system.context.streams
    host = {
        "position": dataclasses.asdict(position),
        "metrics_rows": 0 if run.metrics is None else run.metrics.cursor,
        "streams": {name: stream.state(own(stream.slots)) for name, stream in streams.items()},
        "stores": {name: store.state() for name, store in system.context.stores.items()},
        "anchored": sorted(name for name, learner in system.learners.items() if learner.anchored),
        "frozen": system.frozen_fingerprints,
        "best": run.evaluation.best,
    }
    run.checkpoints.best = run.evaluation.best.get("update")
    run.console.mark("save", position.updates)
    with run.watchdog.meeting("save"):
        run.checkpoints.save(position.updates, system.states, host, system.context.buffer.state(), block=block)
    if run.metrics is not None:
        run.evaluation.write_best(run.folder.path)
    run.saved = position.updates


def _restore(
    system: System, checkpoints: Checkpoints, metrics: MetricsWriter | None, console: RunConsole, evaluation: Evaluation
) -> Position:
    """Take up the last good checkpoint, or start from nothing (rows of a run that never saved are dropped)."""
    restored = checkpoints.restore_latest(system.states)
    if restored is None:
        dropped = metrics.truncate_to(0) if metrics is not None else 0
        if dropped:
            console.note(f"no checkpoint was committed: {dropped} updates are done again from the start")
        return Position()
    for reason in restored.skipped:
        console.note(f"checkpoint skipped: {reason}")
    host = restored.host
    system.check_known(host["frozen"])
    evaluation.best = host.get("best", {})
    checkpoints.best = evaluation.best.get("update")
    system.take_states(restored.state)
    for name, learner in system.learners.items():
        learner.anchored = name in host["anchored"]
        if learner.anchored and system.cfg.loss.kl_weight > 0:
            learner.take_reference(checkpoints.load_reference(learner.state.params, f"reference_{name}"))
    for name in host["streams"]:  # slots, saved by however many processes
        system.context.streams[name].restore([part["streams"][name] for part in restored.host_parts])
    for name, store in system.context.stores.items():
        store.restore([part["stores"][name] for part in restored.host_parts])
    system.context.buffer.restore(restored.array_parts)
    dropped = metrics.truncate_to(host["metrics_rows"]) if metrics is not None else 0
    position = Position(**host["position"])
    console.note(f"resumed after update {position.updates}" + (f"; {dropped} later updates are done again" if dropped else ""))
    return position
