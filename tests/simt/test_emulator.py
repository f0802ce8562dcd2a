"""The emulator of a GPU finds each kind of fault in a kernel's source, and computes right ones."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cuda.arrays import Arrays
from bench.simt.emulator import COMPILER, Emulator, EmulatorFault, compile_kernels
from bench.simt.planted import PLANTED, SEEDS, SOURCE, N, X, is_caught, outcome

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(compile_kernels(tmp_path_factory.mktemp("simt"), [SOURCE]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", PLANTED)
def test_a_planted_fault_is_found_in_every_order(gpu: Emulator, kernel: str, seed: int) -> None:
    assert is_caught(gpu, kernel, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_right_kernels_compute(gpu: Emulator, seed: int) -> None:
    assert outcome(gpu, "right", seed)[:N] == (X + np.roll(X, -1)).tolist()
    assert outcome(gpu, "copied", seed)[:N] == X.tolist()
    assert outcome(gpu, "prefetched", seed)[:N] == X.tolist()
    assert outcome(gpu, "counts", seed)[:4] == [N // 4] * 4
    assert outcome(gpu, "right", seed) == outcome(gpu, "right", 0)
    right = np.roll(X, -1).tolist(), X.astype(np.uint8).view(np.int32).tolist()
    assert outcome(gpu, "bytes", seed)[: N + N // 4] == [*right[0], *right[1]]
    least = [int(~X[last]) for last in (31, 63) for _ in range(32)]  # the largest, as unsigned
    bits = [int(value & 0xFFFFFFFF).bit_count() for value in least]
    assert outcome(gpu, "smallest", seed) == [*least, *bits]
    assert outcome(gpu, "chosen_bytes", seed)[:N] == ((X & 7) | (X >> 3 & 7) << 24).tolist()


def product(gpu: Emulator, kernel: str) -> tuple[bool, bool]:
    """Whether a product of random matrices is that of signed, and of unsigned with signed bytes."""
    random = np.random.default_rng(5)
    a, b = (random.integers(0, 256, (rows, 32), np.uint8) for rows in (16, 8))
    with Arrays(gpu) as arrays:
        places = [arrays.put(a), arrays.put(b), arrays.zeros(np.int32, 16, 8)]
        gpu.launch(kernel, (1, 1, 1), 32, [place.address for place in places])
        c = places[2].read()
    signed, right = a.view(np.int8).astype(np.int32), b.view(np.int8).astype(np.int32)
    return bool((c == signed @ right.T).all()), bool((c == a.astype(np.int32) @ right.T).all())


def test_matrix_products_follow_the_fragment_layout(gpu: Emulator) -> None:
    assert product(gpu, "product_ss") == (True, False)
    assert product(gpu, "product_k16") == (True, False)
    assert product(gpu, "product_us") == (False, True)
    assert product(gpu, "wrong_fragments") == (False, False)


def test_impossible_launches_are_refused(gpu: Emulator) -> None:
    with Arrays(gpu) as arrays:
        x = arrays.put(X).address
        with pytest.raises(EmulatorFault, match="no kernel"):
            gpu.launch("none", (1, 1, 1), N, [x, x])
        with pytest.raises(EmulatorFault, match="2 parameters, not 1"):
            gpu.launch("right", (1, 1, 1), N, [x])
        for threads in (0, 33, 128):
            with pytest.raises(EmulatorFault, match="whole warps up to 64"):
                gpu.launch("right", (1, 1, 1), threads, [x, x])
        for grid in ((0, 1, 1), (1, 65536, 1), (1, 1, 65536)):
            with pytest.raises(EmulatorFault, match="grid"):
                gpu.launch("right", grid, N, [x, x])
    with pytest.raises(EmulatorFault, match="not allocated"):
        gpu.launch("right", (1, 1, 1), N, [x, x])
