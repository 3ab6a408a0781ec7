import configparser
import pathlib

import pytest

from jaxformer.training.config import bundled_configs, load_config
from jaxformer.training.loop import train_and_evaluate

ROOT = pathlib.Path(__file__).parents[1]
SIZES = ("tiny", "small", "base")


# 8 to 25 s each, most of it their data's tokens; CI has a step for them.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(bundled_configs()))
def test_every_experiment_trains_two_steps_at_its_tiny_size(name, tmp_path):
    overrides = ["train.steps=2"]
    if name == "finetune":
        (tmp_path / "labels.tsv").write_text("text\tlabel\n" + "".join(f"text {n}\t{n % 2}\n" for n in range(40)))
        overrides.append(f"data.train={tmp_path / 'labels.tsv'}")
    run = load_config(f"{name}:size=tiny", overrides)
    for field, least in (("max_new_tokens", 3), ("num_pictures", 1)):
        if field in run.config.get("sample", {}):
            run.config.sample[field] = least
    if "decode" in run.config.eval:
        run.config.eval.decode = False  # has tests of its own
    if "decode_examples" in run.config.eval:
        run.config.eval.decode_examples, run.config.data.num_buckets = 0, 1  # so have these
    figures = train_and_evaluate(run, tmp_path / "run")
    assert figures["status"] == "completed"
    assert figures["step"] == 2


@pytest.mark.parametrize("name", sorted(bundled_configs()))
def test_every_experiment_has_its_sizes_and_says_how_to_run_it(name):
    for size in SIZES:
        config = load_config(f"{name}:size={size}").config
        assert config.train.steps > 0
    text = bundled_configs()[name].read_text()
    assert f"jaxformer train --config={name}" in text


@pytest.mark.parametrize("size", SIZES)
def test_language_model_config_is_one_that_its_model_accepts(size):
    from jaxformer.training.assembly import count_parameters, make_parts
    from jaxformer.training.config import resolve
    from jaxformer.training.sharding import make_mesh

    config = load_config(f"language_model:size={size}").config
    decided = {"model.vocab_size": 259, "model.max_length": config.data.length, "schedule.decay_steps": 700_000}
    parts = make_parts(resolve(config, decided), make_mesh())
    # GPT-2 small's published count with 259 tokens in place of 50,257; the others by hand.
    expected = {"tiny": 116_672, "small": 826_496, "base": 124_439_808 - (50_257 - 259) * 768}
    assert count_parameters(parts.state.params) == expected[size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("model", "chunk_size"), [("reformer", 1024), ("sparse", None)])
def test_language_models_with_attentions_of_their_own(model, chunk_size, size):
    from jaxformer.training.assembly import make_model
    from jaxformer.training.config import resolve

    config = load_config(f"language_model:size={size},model={model}").config
    made = make_model(resolve(config, {"model.vocab_size": 259, "model.max_length": config.data.length})).config
    assert (made.positions, made.remat) == ("axial", {"reformer": "none", "sparse": "full"}[model])
    assert config.loss.chunk_size == chunk_size
    assert config.data.packing == "contiguous"
    with pytest.raises(ValueError, match=f"model={model} has attentions of its own; attention can't be local"):
        load_config(f"language_model:size={size},model={model},attention=local")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["reformer", "sparse"])
def test_language_models_with_attentions_of_their_own_train_and_decode(model, tmp_path):
    run = load_config(f"language_model:size=tiny,model={model}", ["train.steps=2", "sample.max_new_tokens=3"])
    assert train_and_evaluate(run, tmp_path)["status"] == "completed"


def test_every_folder_of_the_package_is_listed_for_the_wheel():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxformer").rglob("__init__.py")}
    assert listed == {".".join(folder.parts) for folder in folders} | {"jaxformer.experiments"}
