"""What a run reads and its config only names: templates, data and tokenizers are bound to the run folder by their hash."""

from __future__ import annotations

import pathlib

import pytest
from train_support import files_of, run, system_of

from coevo_jax.errors import UserError
from coevo_jax.judges import JUDGE_PROMPTS, JUDGES, criterion_logits, json_criteria, json_score, likert, points, rar_explicit
from coevo_jax.text import prompts

SHORT = ("schedule.cycles=1", "schedule.k=1")


@pytest.fixture
def template(tmp_path: pathlib.Path) -> pathlib.Path:
    """A template of one's own, with the text of the small world's."""
    path = tmp_path / "my_rubric.txt"
    path.write_text((prompts.FOLDER / "world_rubric.txt").read_text())
    return path


def edit(path: pathlib.Path, text: str) -> None:
    """Change a file between two runs; a process reads a template once, so the next run here is made to read it again."""
    path.write_text(text)
    prompts._load.cache_clear()


def test_a_template_edited_between_stop_and_resume_is_refused(template: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder, ours = tmp_path / "run", (*SHORT, f"rubric.prompt={template}")
    text = template.read_text()
    run(folder, *ours, stop_after=1)
    before = files_of(folder)
    edit(template, text + "Be brief.\n")
    with pytest.raises(UserError, match=r"rubric\.prompt: the content is not what this run began with") as caught:
        run(folder, *ours)
    assert caught.value.where == str(template)
    assert files_of(folder) == before
    allowed = run(folder, *ours, "run.allow_changed_inputs=true")
    assert allowed.finished and any("an input changed" in note and str(template) in note for note in allowed.notes)


def test_every_input_has_a_hash_of_its_content(template: pathlib.Path) -> None:
    ours = (f"rubric.prompt={template}", "pairs.conditioned=1", "warmup.updates=1")
    first = system_of(*ours).inputs
    wanted = {"rubric.prompt", "pairs.conditioned_prompt", "data.prompts", "warmup.data", "tokenizer of policy"}
    assert wanted <= first.keys() and "pairs.inference_prompt" not in first and all(item.hash for item in first.values())
    edit(template, "A comment is not rendered.\n" + template.read_text())
    assert system_of(*ours).inputs["rubric.prompt"].hash == first["rubric.prompt"].hash
    edit(template, template.read_text() + "More.\n")
    second = system_of(*ours).inputs
    assert [key for key in first if first[key].hash != second[key].hash] == ["rubric.prompt"]


def test_the_judges_template_is_an_input() -> None:
    own = {"json_score": json_score.make(None).template, "json_criteria": json_criteria.make(None).template}  # type: ignore
    own |= {protocol: likert.make(protocol)(None).template for protocol in likert.RATINGS}  # type: ignore
    own |= {"rar_explicit": rar_explicit.make(None).single.template}  # type: ignore
    own |= {"criterion_logits": criterion_logits.TEMPLATE, "points": points.make(None).template}  # type: ignore
    assert own == JUDGE_PROMPTS and JUDGE_PROMPTS.keys() == JUDGES.keys()
    judge = ("judge.source=tiny", "sampler.max_prompt=256", "update.pack_length=256", "judge.protocol=json_score")
    found = system_of(*judge, "judge.sampling.max_new_tokens=48").inputs
    assert found["judge.protocol"].where.endswith("judge_score.txt") and found["tokenizer of judge"].hash
