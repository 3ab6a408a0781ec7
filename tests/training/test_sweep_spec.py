import pytest

from jaxformer.training.config import ConfigError, load_config
from jaxformer.training.sweep_groups import make_groups
from jaxformer.training.sweep_loop import listed
from jaxformer.training.sweep_plot import map_axes, mean_map
from jaxformer.training.sweep_spec import MOST_RUNS, parse_sweep, plan_runs


@pytest.fixture(scope="module")
def base():
    return load_config("language_model:size=tiny", ["train.steps=7"])


def plan(base, text):
    return plan_runs(base, text)


def test_sweep_is_the_product_of_values_and_ranges(base):
    runs = plan(base, "optimizer.learning_rate = 1e-4, 3e-4; seed=0..2,7 ;")
    assert [run.name for run in runs][:5] == [
        "learning_rate=1e-4,seed=0",
        "learning_rate=1e-4,seed=1",
        "learning_rate=1e-4,seed=2",
        "learning_rate=1e-4,seed=7",
        "learning_rate=3e-4,seed=0",
    ]
    assert len(runs) == 8
    assert runs[-1].settings == {"optimizer.learning_rate": 3e-4, "seed": 7}
    assert runs[-1].given.config.seed == 7
    assert runs[-1].given.config.train.steps == 7
    assert runs[-1].given.overrides == ("train.steps=7", "optimizer.learning_rate=3e-4", "seed=7")
    assert base.config.seed == 0


def test_values_are_read_by_the_types_of_the_config(base):
    runs = plan(base, "train.batch_size=1e1,20; optimizer.no_decay=('a;c',),(bias, scale); optimizer.clip_norm=None,1")
    assert [run.settings["train.batch_size"] for run in runs[::4]] == [10, 20]
    assert [run.settings["optimizer.no_decay"] for run in runs[::2]][:2] == [("a;c",), ("bias", "scale")]
    assert [run.settings["optimizer.clip_norm"] for run in runs[:2]] == [None, 1.0]
    assert len({run.name for run in runs}) == 8
    assert all("/" not in run.name and len(run.name) < 200 for run in runs)


def test_quotes_keep_separators_in_a_text_and_are_no_part_of_it(base):
    runs = plan(base, "sample.prompt='a, b; c',\"d\",e")
    assert [run.settings["sample.prompt"] for run in runs] == ["a, b; c", "d", "e"]
    assert [run.given.config.sample.prompt for run in runs] == ["a, b; c", "d", "e"]


def test_two_fields_of_one_name_have_their_whole_paths_in_names(base):
    runs = plan(base, "model.name=gpt; data.name=python_stdlib; seed=-0..0")
    assert runs[0].name == "model.name=gpt,data.name=python_stdlib,seed=0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sweep is empty"),
        ("seed", "'seed' needs values: seed=1,2,3"),
        ("seed=", "needs values"),
        ("seed=1,,2", "empty value"),
        ("seed=3..1", "must go upwards"),
        ("seed=0,1; seed=2", "seed is given twice"),
        ("seed=0,1,0", "seed has the value 0 twice"),
        ("optimizer.learning_rate=1e-3,0.001", "has the value 1e-3 twice, as 0.001 too"),
        ("optimizer.weight_decay=0,-0", "has the value 0 twice, as -0 too"),
        ("optimizer.name=adamw,'adamw'", "has the value adamw twice"),
        ("optimizer.learning_rat=1", "optimizer.learning_rate"),
        ("optimizer=1", "is a section"),
        ("seed=1.5", "must be a whole number"),
        ("seed=0..9999999999", f"more than {MOST_RUNS} values"),
        ("seed=0..99; train.steps=1..99", f"9900 runs, must be at most {MOST_RUNS}"),
    ],
)
def test_sweeps_that_mean_nothing_are_refused(base, text, message):
    with pytest.raises(ConfigError, match=message):
        plan(base, text)


def test_parse_gives_paths_and_texts():
    assert parse_sweep("a.b=(1, 2),x; c=-1..1") == [("a.b", ("(1, 2)", "x")), ("c", ("-1", "0", "1"))]


def test_runs_that_differ_in_seed_and_rates_are_one_group(base):
    text = (
        "optimizer.learning_rate=1e-3,2e-3; optimizer.weight_decay=0.0,0.1; schedule.final_fraction=0.1,0.2; seed=0..1"
    )
    (group,) = make_groups(plan(base, text))
    assert len(group) == 16


def test_runs_that_differ_in_structure_are_groups_of_their_own(base):
    runs = plan(
        base, "model.num_layers=1,2; optimizer.learning_rate=1e-3,2e-3; optimizer.clip_norm=None,0.5,1; seed=0..1"
    )
    groups = make_groups(runs)
    assert [len(group) for group in groups] == [4, 8, 4, 8]  # None is another structure than a number
    assert sorted(run.name for group in groups for run in group) == sorted(run.name for run in runs)
    assert len(make_groups(plan(base, "schedule.warmup_steps=1,2; train.batch_size=1,2"))) == 4


def test_max_together_cuts_groups_into_equal_parts(base):
    runs = plan(base, "seed=0..9")
    assert [len(group) for group in make_groups(runs, 4)] == [3, 3, 4]
    assert [len(group) for group in make_groups(runs, 99)] == [10]
    with pytest.raises(ConfigError, match="max_together is 0"):
        make_groups(runs, 0)


def test_few_of_many_runs_are_listed():
    assert listed(["a"]) == "1 run: a"
    assert listed(list("abcd")) == "4 runs together: a, b, c, d"
    assert listed([*"abcd", *map(str, range(104))]) == "108 runs together: a, b, c, d, and 104 more"


def test_map_is_the_mean_over_what_else_varies():
    rows = [
        {"rate": rate, "decay": decay, "seed": seed, "validation_loss": loss}
        for rate, decay, seed, loss in [(1, 0.1, 0, 2.0), (1, 0.1, 1, 4.0), (2, 0.1, 0, 5.0), (1, 0.3, 0, None)]
    ]
    assert map_axes(rows, ["rate", "decay", "seed"]) == ("rate", "decay")
    assert map_axes(rows, ["rate", "seed"]) is None
    across, down, means = mean_map(rows, "rate", "decay")
    assert (across, down) == ([1, 2], [0.1, 0.3])
    assert means[0] == [3.0, 5.0]
    assert all(value != value for value in means[1])
