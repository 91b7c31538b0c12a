"""Each program of the gallery runs as its first lines say, is short, and prints the figures that it
is there for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import flags
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PICTURES = {
    "lenet": "accuracy",
    "tensor_parallel_vae": "digits",
    "gpt2_ddp_profile": "memory",
    "experts": "loads",
    "islands": "losses",
}
NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)"
ROUNDING = 1e-12  # in float64: some thousand roundings of 1e-16


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What `python examples/NAME.py` prints, run once, in a folder of its own."""
    folder, done = tmp_path_factory.mktemp("gallery"), {}

    def run(name: str, *arguments: str) -> str:
        if (name, *arguments) not in done:
            paths = os.pathsep.join(
                filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")])
            )
            environment = (
                os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | flags.of_users()
            )
            command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
            ended = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=500,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            if name in PICTURES:
                check_picture(folder / "out" / name / f"{PICTURES[name]}.png")
            done[name, *arguments] = ended.stdout
        return done[name, *arguments]

    return run


def check_picture(path: Path) -> None:
    import matplotlib.image

    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 300
    assert 0.02 < (pixels[..., :3].min(axis=-1) < 0.9).mean() < 0.95  # drawn on, and not all over


def numbers(text: str, pattern: str) -> list[float]:
    """What stands where `pattern` has a #, in its first match."""
    found = re.search(pattern.replace("#", NUMBER), text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return [float(number) for number in found.groups()]


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
def test_the_regression_recovers_its_line_and_keeps_replicas_in_step(printed):
    text = printed("linear_regression")
    for name in ("slope", "intercept"):
        truth, learnt, best = numbers(text, rf"{name} +# +# +#")
        assert learnt == pytest.approx(best, abs=1e-4)  # the digits that are printed
        assert learnt == pytest.approx(
            truth, abs=0.02
        )  # three standard deviations: noise 0.5 / sqrt(8192) = 0.006
        assert f"{name} on the 8 devices: 1 different number\n" in text
    assert numbers(text, "agree to the last bit on # of # points") == [8192, 8192]


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_cells_have_one_hash_on_two_meshes_and_ordinary_steps_have_two(printed):
    found = [line.split() for line in printed("same_bits").splitlines()]
    hashes = {kind: {words[-1] for words in found if words[0] == kind} for kind, *_ in found}
    assert len(hashes["same"]) == 1
    assert len(hashes["ordinary"]) == 2


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_three_ways_agree_to_rounding_and_send_what_the_formulas_say(printed):
    text = printed("three_ways_to_split")
    (alone,) = numbers(text, "One device: loss #")
    for axis in ("data", "tensor", "stage"):
        part = text.split(f"along '{axis}'")[1]
        assert numbers(part, "loss #") == [pytest.approx(alone, rel=ROUNDING)]
        assert numbers(part, "differ from one device's by #")[0] < ROUNDING
        formula, program = re.search(
            r"sends +([\d,]+) bytes by formula; ([\d,]+) in", part
        ).groups()
        assert formula == program


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_each_mistake_has_a_number_and_a_message(printed):
    text = printed("wrong_on_purpose")
    reported, made = numbers(text, "reports a loss of #; the net that it made has #")
    assert made > 10 * reported
    assert numbers(text, "256 rows go in and # come out, which are #% off")[0] == 32
    assert numbers(text, "the gradient is # times that of one device") == [8.0]
    assert "after 5 s" in text
    flat = " ".join(text.split())
    for message in (
        "so each replica would train a different model; split it with fsdp('data', size=8)",
        "tensor.copy_to needs an x that is the same along 'data'",
        "this sum over 'data' adds 8 equal copies",
        "a cond whose predicate differs along 'data'",
    ):
        assert message in flat
    assert text.count("  caught  ") == text.count("  why     ") == 4


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_lenet_learns_the_same_on_1_2_and_8_devices(printed):
    text = printed("lenet")
    assert numbers(text, "differ from that of one by # at most")[0] <= 1e-5
    last = [numbers(text, rf"devices: {n}  .* 24: #%; # s per epoch")[0] for n in (1, 2, 8)]
    assert min(last) >= 95


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_the_vae_on_8_devices_has_the_loss_of_one(printed):
    text = printed("tensor_parallel_vae")
    assert numbers(text, "that on one: # of it apart at most")[0] < ROUNDING
    assert numbers(text, r"step   1 +# +#")[0] > numbers(text, r"step 500 +# +#")[0]


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_data_parallel_gpt2_has_the_loss_of_one_device_and_sends_its_gradients(printed):
    text = printed("gpt2_ddp_profile")
    own = re.search(r"own losses are (.*);", text)[1].split()
    mean, alone = numbers(text, "is the step's: #; one device alone has #")
    assert sum(map(float, own)) / 4 == pytest.approx(mean, abs=1e-4)  # the digits that are printed
    assert mean == alone
    assert (
        numbers(text, "in 16 steps: # of the loss")[0] < 2e-6
    )  # float32: some roundings of 1.2e-7; 1.2e-7 was seen
    weights = numbers(text, r"MB of weights +# +#")[0]
    assert numbers(text, r"MB sent a step +# +#") == [
        0,
        pytest.approx(2 * 3 / 4 * weights, rel=0.01),
    ]


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_a_model_of_ones_own_goes_on_with_the_same_bits(printed):
    text = printed("custom_training")
    assert "restored step 60" in text
    assert (
        "Both end with the same bits in all weights and moments; of the copies on other devices 0 "
        "differ." in text
    )
    assert numbers(text, "step 120 .* test accuracy #%")[0] > 90


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_lora_learns_by_its_factors_alone_and_sends_no_more(printed):
    text = printed("lora")
    whole, factors = (re.sub(r"(?<=\d),(?=\d)", "", part) for part in text.split("Factors of rank"))
    for part, count in ((whole, 85_002), (factors, 4_392)):
        trained, kept, sent = numbers(
            part, "trained # numbers; a device kept # bytes of moments, and sent # bytes a step"
        )
        assert (trained, kept) == (count, 8 * count)
        assert sent == pytest.approx(2 * 7 / 8 * 4 * count, rel=0.01)  # and of the loss
    before, after = (
        numbers(whole, "in a mirror #%")[0],
        numbers(factors, "test accuracy in a mirror: #%")[0],
    )
    assert before < 50
    assert after > 90
    assert "Of the frozen net 0 numbers differ" in text


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_a_mixture_learns_faster_than_its_dense_twin_and_its_load_evens_out(printed):
    """Faster at first. After 200 steps the two are even: with other batches either is ahead, by
    0.01."""
    text = printed("experts")
    used = [
        float(part.replace(",", "")) for part in re.findall(r"of which a token uses ([\d,]+)", text)
    ]
    assert used[0] == pytest.approx(used[1], rel=0.01)
    mixture, twin = numbers(text, r"\n  50 +# +#")
    assert mixture < twin - 0.03
    mixture, twin = numbers(text, r"\n 200 +# +#")
    assert mixture == pytest.approx(twin, abs=0.03)
    first, last = numbers(text, r"step   1  layer 0: #, "), numbers(text, r"step 200  layer 0: #, ")
    assert last < first


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_long_sequences_take_a_share_of_the_memory_and_all_devices_do_the_same(printed):
    text = printed("long_context", "--quick")
    alone, ring = (
        numbers(text, r"\n +256 +above # +#.*")[1],
        numbers(text, r"\n +256 +above \S+ +\S+ +#")[0],
    )
    assert alone > 2.5 * ring
    assert "zigzag: each device computes 9 blocks; devices 0 to 3 need 8, 8, 8, 8 of them" in text
    assert numbers(text, "step  3  loss #")[0] < numbers(text, "step  1  loss #")[0]


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
def test_ours_inside_jit_and_jit_inside_ours_learn_the_same(printed):
    text = printed("inside_jit")
    assert numbers(text, "differ by # of the loss at most")[0] < ROUNDING
    first, last = numbers(text, "loss of step 1: #, of step 20: #")
    assert last < first / 2
    sent = {
        tuple(line.split()[:2])
        for line in text.splitlines()[2:]
        if line.startswith(("data", "tensor"))
    }
    assert sent == {
        ("data", "all-reduce"),
        ("data", "collective-permute"),
        ("tensor", "all-reduce"),
        ("tensor", "collective-permute"),
    }


@pytest.mark.programs
def test_an_mlp_on_eight_devices_has_the_losses_of_one(printed):
    text = printed("mlp")
    assert numbers(text, "largest difference #")[0] < 1e-5  # float32
    assert numbers(text, "step 100  one device #")[0] < numbers(text, "step   1  one device #")[0]


@pytest.mark.programs
def test_a_resnet_on_eight_devices_has_the_losses_of_one_by_statistics_over_devices(printed):
    text = printed("resnet")
    assert numbers(text, "statistics over devices: largest difference #")[0] < 1e-5  # float32
    assert numbers(text, "statistics of own rows: largest difference #")[0] > 0.01
    assert numbers(text, "test accuracy with the running statistics: #%")[0] > 80


def test_mnists_files_are_read_and_a_wrong_one_is_told(tmp_path):
    sys.path.insert(0, str(EXAMPLES))
    try:
        import digits
    finally:
        sys.path.remove(str(EXAMPLES))
    for part, count in (("train", 3), ("t10k", 2)):
        images = bytes(
            [
                0,
                0,
                8,
                3,
                *(0, 0, 0, count),
                *(0, 0, 0, 2),
                *(0, 0, 0, 2),
                *([0, 51, 102, 255] * count),
            ]
        )
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(
            bytes([0, 0, 8, 1, *(0, 0, 0, count), *range(count)])
        )
    learn, held_out = digits.load(tmp_path)
    assert learn.images.shape == (3, 2, 2)
    assert held_out.images[1].ravel().tolist() == pytest.approx([0, 0.2, 0.4, 1])
    assert learn.labels.tolist() == [0, 1, 2]
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, *(0, 0, 0, 9), 1]))
    with pytest.raises(
        ValueError, match="t10k-labels-idx1-ubyte: needed an IDX file of bytes in 1 dims"
    ):
        digits.load(tmp_path)
    with pytest.raises(ValueError, match="found neither"):
        digits.load(tmp_path / "nowhere")


@pytest.mark.programs
@pytest.mark.sweep(3, "gallery")
@pytest.mark.long
def test_islands_talk_seldom_and_learn_as_much(printed):
    text = printed("islands")
    (plain,) = numbers(text, "data parallelism +#")
    for name, fewer in (("islands, every 10 steps", 10), ("islands, int8", 38)):
        loss, ratio = numbers(text, f"{name} +# +[\\d,]+ +1/#;")
        assert ratio == pytest.approx(
            fewer, rel=0.05
        )  # int8: an exponent for 32 numbers, and small leaves go as float32
        assert loss < 1.02 * plain
