import json
import math

import pytest
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxformer.training.config import (
    RunConfig,
    bundled_configs,
    copy_config,
    differences,
    load_config,
    parse_arg,
    read_config,
    resolve,
    split_spec,
    write_config,
)
from jaxformer.training.overrides import ConfigError, apply_overrides


def make_config():
    config = ConfigDict()
    config.steps = 10
    config.rate = 0.5
    config.flag = True
    config.name = "abc"
    config.sizes = (1, 2)
    config.scales = (0.5, 2.0)
    config.names = ("a", "b")
    config.empty = ()
    config.dropout = placeholder(float)
    config.limit = placeholder(int)
    config.free = None
    config.model = ConfigDict({"num_layers": 3, "optimizer": {"learning_rate": 0.1}})
    return config


def overridden(*overrides):
    config = make_config()
    apply_overrides(config, overrides)
    return config


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=7", "steps", 7),
        ("steps=-7", "steps", -7),
        ("steps=10_000", "steps", 10_000),
        ("steps=1e3", "steps", 1000),
        ("steps=1.5e1", "steps", 15),
        ("rate=1", "rate", 1.0),
        ("rate=.1", "rate", 0.1),
        ("rate=1e-4", "rate", 1e-4),
        ("rate=inf", "rate", math.inf),
        ("flag=false", "flag", False),
        ("flag=False", "flag", False),
        ("flag=0", "flag", False),
        ("flag=1", "flag", True),
        ("flag", "flag", True),
        ("name=x=y, z", "name", "x=y, z"),
        ("name=", "name", ""),
        ("name=None", "name", "None"),
        ("name=3", "name", "3"),
        ("sizes=(3,4,5)", "sizes", (3, 4, 5)),
        ("sizes=[3, 4]", "sizes", (3, 4)),
        ("sizes=3,4", "sizes", (3, 4)),
        ("sizes=3", "sizes", (3,)),
        ("sizes=(3,)", "sizes", (3,)),
        ("sizes=()", "sizes", ()),
        ("sizes=1e3,2", "sizes", (1000, 2)),
        ("scales=1", "scales", (1.0,)),
        ("names=local,dense", "names", ("local", "dense")),
        ("names=('local', \"dense\")", "names", ("local", "dense")),
        ("empty=3,4", "empty", (3, 4)),
        ("empty=a,b", "empty", ("a", "b")),
        ("dropout=.1", "dropout", 0.1),
        ("dropout=1", "dropout", 1.0),
        ("dropout=None", "dropout", None),
        ("limit=5", "limit", 5),
        ("free=0.25", "free", 0.25),
        ("free=word", "free", "word"),
        ("model.num_layers=5", "model.num_layers", 5),
        ("model.optimizer.learning_rate=2", "model.optimizer.learning_rate", 2.0),
    ],
)
def test_override_is_read_by_the_type_of_its_field(override, path, value):
    found = overridden(override)
    for part in path.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(item) for item in found] == [type(item) for item in value]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=2.5", "steps must be a whole number, got '2.5'"),
        ("steps=many", "steps must be a whole number"),
        ("steps=", "steps must be a whole number"),
        ("steps=1e400000", "steps must be a whole number"),
        ("steps=nan", "steps must be a whole number"),
        ("steps=true", "steps must be a whole number"),
        ("steps=None", "steps cannot be None"),
        ("steps", "steps needs a value"),
        ("rate=fast", "rate must be a number"),
        ("rate=nan", "rate must be a number"),
        ("flag=2", "flag must be true or false"),
        ("sizes=2.5", "sizes must be a sequence"),
        ("sizes=3,x", "sizes must be a sequence"),
        ("dropout=much", "dropout must be a number or None"),
        ("model=3", "model is a section, not a field; its fields are model.num_layers"),
        ("stepz=3", "no field stepz; did you mean steps"),
        ("model.num_layer=3", "no field model.num_layer; did you mean model.num_layers"),
        ("learning_rat=3", "did you mean model.optimizer.learning_rate"),
        ("model.optimizer.learning_rate.x=3", "no field model.optimizer.learning_rate.x"),
        ("=3", "no field"),
    ],
)
def test_bad_override_is_refused_with_its_reason(override, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        overridden(override)


def test_placeholder_is_overridden_and_goes_back_to_none():
    assert overridden("dropout=.1", "dropout=None").dropout is None
    assert overridden("dropout=None", "dropout=.2").dropout == 0.2


def test_later_override_wins():
    assert overridden("steps=3", "steps=5").steps == 5


def test_computed_field_follows_an_override():
    config = make_config()
    config.double = config.get_ref("steps") * 2
    apply_overrides(config, ["steps=7"])
    assert config.double == 14


CONFIG_FILE = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxformer.training.config import parse_arg


def get_config(arg=None):
    chosen = parse_arg(arg, size=("small", "tiny"), attention=("dense", "local"))
    config = ConfigDict({"steps": 3 if chosen["size"] == "tiny" else 30, "sizes": (1, 2)})
    config.attention = chosen["attention"]
    config.limit = placeholder(int)
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(CONFIG_FILE)
    return path


def test_config_file_is_loaded_by_path_with_argument_and_overrides(config_file):
    run = load_config(f"{config_file}:size=tiny", ["limit=7"])
    assert (run.config.steps, run.config.attention, run.config.limit) == (3, "dense", 7)
    assert (run.source, run.arg, run.overrides) == (str(config_file), "size=tiny", ("limit=7",))
    assert load_config(str(config_file)).config.steps == 30


def test_config_in_python_needs_no_command_line(config_file, monkeypatch):
    monkeypatch.setattr("sys.argv", ["notebook", "--f=kernel.json"])
    run = load_config(str(config_file))
    run.config.steps = 2
    run.config.limit = 4
    assert (run.config.steps, run.config.limit) == (2, 4)
    with pytest.raises((KeyError, AttributeError)):
        run.config.stepz = 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{file}:size=tony", "size must be one of small, tiny, got 'tony'"),
        ("{file}:sise=tiny", "no part 'sise'; did you mean size"),
        ("{file}:tiny", "no part 'tiny'"),
        ("{file}:size", "size must be one of"),
        ("{folder}/other.py", "does not exist"),
        ("langage_model", "no bundled config is named 'langage_model'; did you mean language_model"),
        ("{folder}/empty.py", "has no function get_config"),
        ("{folder}/broken.py", "is not valid Python"),
        ("{folder}/plain.py", "must return a ConfigDict"),
        ("{folder}/plain.py:a=b", "takes no argument"),
    ],
)
def test_config_that_cannot_be_loaded_is_refused(config_file, spec, message):
    folder = config_file.parent
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_text("def get_config(:\n")
    (folder / "plain.py").write_text("def get_config():\n    return {}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(spec.format(file=config_file, folder=folder))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a/b.py:size=tiny", ("a/b.py", "size=tiny")),
        ("a/b.py", ("a/b.py", None)),
        ("name:size=tiny,attention=local", ("name", "size=tiny,attention=local")),
        ("name", ("name", None)),
        ("name:", ("name", None)),
    ],
)
def test_spec_is_split_at_its_first_colon(spec, expected):
    assert split_spec(spec) == expected


def test_parse_arg_takes_the_first_choice_as_default():
    assert parse_arg(None, size=("small", "tiny")) == {"size": "small"}
    assert parse_arg("size=tiny", size=("small", "tiny")) == {"size": "tiny"}


def test_bundled_configs_are_found():
    assert "language_model" in bundled_configs()


def test_stored_config_is_rebuilt_without_its_file(config_file, tmp_path):
    run = load_config(f"{config_file}:attention=local", ["sizes=(3,)", "limit=7"])
    write_config(tmp_path / "config.json", run, {"limit": 9})
    config_file.unlink()
    rebuilt, resolved = read_config(tmp_path / "config.json")
    assert rebuilt.config == run.config
    assert rebuilt.config.sizes == (3,)
    assert (rebuilt.source, rebuilt.arg, rebuilt.overrides) == (run.source, run.arg, run.overrides)
    assert resolved == {"limit": 9}


def test_stored_config_keeps_tuples_placeholders_and_number_types(tmp_path):
    config = make_config()
    config.nested = ((1, 2), ("a",))
    config.rate = 1.0
    write_config(tmp_path / "config.json", RunConfig(config), {})
    rebuilt = read_config(tmp_path / "config.json")[0].config
    assert rebuilt.nested == ((1, 2), ("a",))
    assert type(rebuilt.rate) is float
    assert rebuilt.dropout is None
    apply_overrides(rebuilt, ["dropout=1", "dropout=None", "dropout=.5", "sizes=7", "empty=1"])
    assert (rebuilt.dropout, rebuilt.sizes, rebuilt.empty) == (0.5, (7,), (1,))
    with pytest.raises(ConfigError):
        apply_overrides(rebuilt, ["dropout=x"])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"config": {}, "types": {}}', '{"config": 3'])
def test_damaged_stored_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read_config(tmp_path / "config.json")


def test_folder_without_config_is_not_a_run_directory(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_config(tmp_path / "config.json")


def test_config_value_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.function must be a number, text, bool or tuple"):
        write_config(tmp_path / "config.json", RunConfig(ConfigDict({"function": print})), {})


def test_copy_does_not_change_its_original():
    config = make_config()
    copied = copy_config(config)
    copied.model.num_layers = 11
    assert config.model.num_layers == 3
    assert RunConfig(config).with_overrides(["steps=11"]).config.steps == 11
    assert config.steps == 10


def test_resolved_values_stand_in_for_none():
    config = make_config()
    assert resolve(config, {"limit": 9, "model.num_layers": 5}).limit == 9
    assert config.limit is None


def test_differences_list_structure_and_not_length_or_logging():
    old = ConfigDict({"train": {"steps": 10, "batch_size": 4}, "log": {"every_steps": 2}, "model": {"num_layers": 2}})
    new = copy_config(old)
    new.train.steps = 20
    new.log.every_steps = 5
    assert differences(old, new) == []
    new.model.num_layers = 3
    with new.unlocked():
        new.model.extra = 1
    assert sorted(differences(old, new)) == ["model.extra: absent before, 1 now", "model.num_layers: 2 before, 3 now"]
    assert "model.extra: 1 before, absent now" in differences(new, old)


def test_written_config_is_plain_json_to_read(tmp_path):
    write_config(tmp_path / "config.json", RunConfig(make_config(), "task", "size=tiny", ("steps=3",)), {})
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["config"]["model"]["num_layers"] == 3
    assert (stored["source"], stored["arg"], stored["overrides"]) == ("task", "size=tiny", ["steps=3"])
