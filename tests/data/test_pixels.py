import math

import numpy as np
import pytest
from PIL import Image

from jaxformer.data import contact_sheet, load_digits, load_images, load_pixel_data, write_png


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve colour images of 5 × 3 pixels in two classes; one is there twice."""
    path = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for index in range(12):
        values = random.integers(0, 256, (3, 5, 3)).astype(np.uint8)
        file = path / ("cats" if index % 3 else "big dogs") / f"{index:02}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(values).save(file)
        if index == 4:
            Image.fromarray(values).save(file.with_name("again.png"))
    return path


def test_digits_are_rows_of_pixels_in_raster_order():
    data = load_pixel_data()
    pictures = load_digits()
    train, validation = data.train_rows, data.validation_rows
    assert len(train) + len(validation) == len(pictures.values) == 1797
    assert 120 < len(validation) < 240
    assert (data.max_length, data.row_length, data.num_levels) == (65, 8, 17)
    batch = train.batch(np.array([0, 5, len(train)]))
    assert batch["tokens"].shape == batch["targets"].shape == (3, 65)
    every = {picture.tobytes() for picture in pictures.values}
    for tokens, targets in zip(batch["tokens"][:2], batch["targets"]):
        assert tokens[0] == data.tokenizer.bos_id == data.tokenizer.vocab_size - 1
        assert (targets[:-1] == tokens[1:]).all()
        assert targets[-1] == -100
        assert tokens[1:].astype(np.uint8).tobytes() in every
    assert (batch["targets"][2] == -100).all()
    assert data.bits_per == {"bits_per_dim": len(validation) * 64}


def test_the_class_is_the_only_target_after_the_last_pixel():
    data, drawn = load_pixel_data(targets="label"), load_pixel_data()
    rows = data.validation_rows
    batch = rows.batch(np.arange(len(rows)))
    assert (batch["targets"][:, :-1] == -100).all()
    np.testing.assert_array_equal(batch["tokens"], drawn.validation_rows.batch(np.arange(len(rows)))["tokens"])
    pictures = load_digits()
    labels = {picture.tobytes(): label for picture, label in zip(pictures.values, pictures.labels)}
    for tokens, targets in zip(batch["tokens"], batch["targets"]):
        label = labels[tokens[1:].astype(np.uint8).tobytes()]
        assert data.tokenizer.symbols[targets[-1]] == f"class:{label}"
    assert data.bits_per == {}
    assert data.hash != drawn.hash


def test_images_of_a_folder_keep_channels_together_and_are_named_by_folder(folder):
    data = load_pixel_data(name="images", path=str(folder), height=3, width=5, channels=3, validation_fraction=0.4)
    assert data.row_length == 15
    assert data.tokenizer.symbols[256:] == ("class:big_dogs", "class:cats", "<start>")
    found = {}
    for rows in (data.train_rows, data.validation_rows):
        for tokens, label in zip(rows.batch(np.arange(len(rows)))["tokens"], rows.label_ids):
            found.setdefault(tuple(tokens[1:]), []).append((data.tokenizer.symbols[label], rows is data.train_rows))
    files = sorted(folder.rglob("*.png"))
    assert sum(map(len, found.values())) == len(files) == 13
    for file in files:
        values = np.asarray(Image.open(file))
        sequence = tuple(
            values[row, column, channel] for row in range(3) for column in range(5) for channel in range(3)
        )
        # Equal pictures are on one side.
        assert set(found[sequence]) == {(f"class:{file.parent.name.replace(' ', '_')}", found[sequence][0][1])}


def test_images_are_resized_and_rounded_to_levels(folder, tmp_path):
    pictures = load_images(str(folder), height=7, width=2, channels=None, num_levels=4)
    assert pictures.values.shape == (13, 7, 2, 1)
    assert pictures.values.max() <= 3
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    exact = load_images(str(tmp_path), height=16, width=16, channels=1, num_levels=8)
    np.testing.assert_array_equal(exact.values[0, :, :, 0], grey // 32)
    assert exact.classes == ("image",)


@pytest.mark.parametrize("channels", [1, 3])
def test_written_pictures_are_read_again(tmp_path, channels):
    values = np.random.default_rng(1).integers(0, 17, (5, 3, 4, channels)).astype(np.uint8)
    sheet = contact_sheet(values, 17, scale=2)
    assert sheet.shape == (2 * 8, 3 * 10, channels)
    write_png(tmp_path / "new" / "a.png", sheet)
    read = np.asarray(Image.open(tmp_path / "new" / "a.png")).reshape(sheet.shape)
    np.testing.assert_array_equal(read, sheet)
    fourth = read[8:16, 0:10]  # second row, first column
    np.testing.assert_array_equal(fourth[1:7:2, 1:9:2], values[3].astype(int) * 255 // 16)
    np.testing.assert_array_equal(fourth[2:7:2, 2:9:2], values[3].astype(int) * 255 // 16)
    assert (read[8:16, 20:30, 0] == 128).all()  # no sixth picture


def test_baselines_are_of_the_validation_pictures():
    data = load_pixel_data()
    train, validation = data.train_rows.values, data.validation_rows.values
    total, each = 0.0, 0.0
    for place in range(64):
        for level in range(17):
            count = (validation[:, place] == level).sum()
            total -= count * math.log2(((train == level).sum() + 1) / (train.size + 17))
            each -= count * math.log2(((train[:, place] == level).sum() + 1) / (len(train) + 17))
    assert f"levels {total / validation.size:.4f} bits per dim" in data.baselines
    assert f"each place {each / validation.size:.4f} bits per dim" in data.baselines
    assert "most frequent class of training has an accuracy of 0." in load_pixel_data(targets="label").baselines


def test_everything_may_be_evaluated():
    data = load_pixel_data(validation_fraction=1.0)
    assert (len(data.train_rows), len(data.validation_rows)) == (0, 1797)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "letters"}, "name is 'letters'; must be digits or images"),
        ({"targets": "both"}, "targets is 'both'; must be one of pixels, label"),
        ({"width": 9}, "width is 9; the digits have their own"),
        ({"length": 64}, "length is 64; a picture has 65 tokens"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0"),
        ({"split_seed": -1}, "split_seed is -1"),
        ({"name": "images"}, "path is None; must be a folder"),
        ({"name": "images", "path": "."}, "holds no image"),
        ({"name": "images", "path": ".", "channels": 2}, "channels 2"),
        ({"name": "images", "path": ".", "num_levels": 257}, "num_levels 257"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_pixel_data(**change)


def test_a_file_that_is_no_image_is_named(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        load_pixel_data(name="images", path=str(tmp_path))
