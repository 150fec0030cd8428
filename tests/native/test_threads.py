"""The pool of threads: how many, when idle, under several callers, after a fork, and at the end of the process."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from pippin.core import native
from pippin.core.errors import InvalidArgument

from .decoders import NativeDecoder, Work, random_decoder

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable_reason())


def use(count: int, pin: bool = False) -> None:
    """So many threads, even on a machine with fewer cores."""
    library = native.library()
    library.check(library.call("set_threads", count, int(pin)))


@pytest.fixture(autouse=True)
def as_before():
    before = native.threads()
    yield
    use(before)


def run(code: str) -> str:
    """What a Python process of its own prints."""
    head = f"""
        import os, sys, threading, time, warnings
        from pathlib import Path
        from pippin.core import native
        native._FOLDER = Path({str(native._FOLDER)!r})
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is what is tried here
        library = native.library()
        def use(count, pin=0): library.check(library.call("set_threads", count, pin))
        def busy():
            found = library.call("read_bandwidth", 1 << 20, native.threads(), 3)
            assert found > 0, found
    """
    code = textwrap.dedent(head) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_count_is_what_was_asked_for():
    for count in (1, 3, 2, 16, 1):
        use(count)
        assert native.threads() == count


@pytest.mark.parametrize("count", [0, -1, 257])
def test_a_count_out_of_range_is_refused(count):
    use(2)
    with pytest.raises(InvalidArgument, match=f"from 1 to 256, not {count}"):
        use(count)
    assert native.threads() == 2


def test_too_few_threads_in_the_system_is_an_error_and_leaves_one():
    said = run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # no room for the stacks of so many
        status = library.call("set_threads", 256, 0)
        print(status, library.call("error").decode(), native.threads())
        busy()
        """
    )
    assert said == "-3 the system has not enough threads for 256 1"


def test_a_bandwidth_of_threads_that_do_not_start_is_an_error():
    said = run(
        """
        import resource
        before = native.threads()
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        print(library.call("read_bandwidth", 1 << 20, 256, 1), native.threads() == before)
        """
    )
    assert said == "-3.0 True"


@pytest.mark.parametrize("pin", [False, True])
def test_more_threads_than_cores_compute_the_same(pin):
    decoder = NativeDecoder(random_decoder(0, width=128, size=256, vocab=500), "INT4")
    ids = np.random.default_rng(0).integers(0, 500, 200).tolist()
    use(1)
    alone = decoder.whole(ids)[0]
    for count in (2, 7):
        use(count, pin)
        for _ in range(3):
            np.testing.assert_array_equal(decoder.whole(ids)[0], alone)


def test_several_callers_at_once():
    """Each of four Python threads gets its own answers, while a fifth changes the number of threads."""
    use(2)
    weights = random_decoder(1, width=64, size=128)
    decoders = [NativeDecoder(weights, "INT4") for _ in range(4)]
    texts = [np.random.default_rng(i).integers(0, 50, 60).tolist() for i in range(4)]
    expected = [decoders[0].whole(text)[0] for text in texts]
    wrong, stop = [], threading.Event()

    def work(number: int) -> None:
        for _ in range(30):
            found = decoders[number].whole(texts[number])[0]
            if not np.array_equal(found, expected[number]):
                wrong.append(number)

    def change() -> None:
        while not stop.is_set():
            for count in (1, 3, 2):
                use(count)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    changer = threading.Thread(target=change)
    for thread in [*workers, changer]:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    changer.join()
    assert not wrong


def test_idle_helpers_use_no_processor():
    used = run(
        """
        use(4)
        busy()
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        print(time.process_time() - before)
        """
    )
    assert float(used) < 0.02


def test_a_forked_process_computes_and_so_does_its_parent():
    said = run(
        """
        use(3)
        busy()
        child = os.fork()
        busy()
        if child == 0:
            print("child", native.threads(), flush=True)
            use(2)
            busy()
            grandchild = os.fork()
            busy()
            if grandchild:
                os.waitpid(grandchild, 0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("parent", native.threads())
        """
    )
    assert said.splitlines() == ["child 3", "parent 3"]


def test_forking_while_others_compute():
    run(
        """
        use(2)
        stop = threading.Event()
        def work():
            while not stop.is_set():
                busy()
        worker = threading.Thread(target=work, daemon=True)  # so that a failure ends the process
        worker.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                busy()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        worker.join()
        """
    )


def test_forking_while_a_thread_computes_for_the_first_time():
    said = run(
        """
        import signal
        use(2)
        def exit_code():
            threading.Thread(target=busy, daemon=True).start()
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                busy()
                os._exit(0)
            return int(os.waitpid(child, 0)[1] != 0)
        failed = 0
        for _ in range(300):
            first = os.fork()  # in which nothing was computed before
            if first == 0:
                os._exit(exit_code())
            failed += os.waitpid(first, 0)[1] != 0
        print(failed)
        """
    )
    assert said == "0"


@pytest.mark.parametrize(
    "last",
    ["time.sleep(0.05)", "pass", "threading.Thread(target=lambda: [busy() for _ in range(9999)], daemon=True).start()"],
    ids=["asleep", "spinning", "working"],
)
def test_a_process_may_end_at_any_moment(last):
    assert run(f"use(4)\nbusy()\nprint('done', flush=True)\n{last}") == "done"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ties threads to cores")
def test_pinned_helpers_have_cores_of_their_own():
    said = run(
        """
        cores = os.sched_getaffinity(0)
        if len(cores) < 2:
            print(True, True, True)
            raise SystemExit
        use(len(cores), 1)
        busy()
        masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        pinned = [next(iter(mask)) for mask in masks if len(mask) == 1]
        print(len(pinned) == len(cores) - 1, len(set(pinned)) == len(pinned), set(pinned) <= cores)
        """
    )
    assert said == "True True True"


def test_a_step_is_not_held_up_by_helpers_that_get_no_core():
    """Far more helpers than cores: the caller does the work alone, at about one thread's speed."""
    decoder = NativeDecoder(random_decoder(2, width=64, size=128), "INT4")
    work = [Work([1], 0, [0], [0])]

    def best(count: int) -> float:
        use(count)
        times = []
        for _ in range(60):
            begin = time.perf_counter()
            decoder.forward(work)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best(32) < 20 * best(1) + 0.002


def test_the_bandwidth():
    library = native.library()
    use(3)
    assert 1e8 < library.call("read_bandwidth", 1 << 24, 1, 3) < 1e13
    assert native.threads() == 3  # as before
    for bad in [(100, 1, 1), (1 << 20, 0, 1), (1 << 20, 1, 0), (1 << 20, 300, 1)]:
        assert library.call("read_bandwidth", *bad) == -1
        with pytest.raises(InvalidArgument, match="bandwidth needs"):
            library.check(-1)
    assert library.call("read_bandwidth", 1 << 60, 1, 1) == -2


def test_the_profile_adds_up():
    decoder = NativeDecoder(random_decoder(3, width=64, size=128), "INT4")
    before, begin = native.profile(), time.perf_counter()
    decoder.whole([1] * 100)
    passed = time.perf_counter() - begin
    spent = [after - start for after, start in zip(native.profile(), before, strict=True)]
    assert min(spent) >= 0
    assert min(spent[:3]) > 0
    assert passed / 100 < sum(spent) < passed


def test_an_unknown_instruction_set_is_refused():
    library = native.library()
    names = native.instruction_sets()
    assert names[-1] == "generic"
    assert native.instruction_set() == names[0]
    assert library.call("use_instruction_set", b"sse9") == -1
    with pytest.raises(InvalidArgument, match="'sse9' here: there are"):
        library.check(-1)


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", native.instruction_sets())
def test_every_instruction_set_computes_about_the_same(name, cache):
    weights = random_decoder(4, layers=[{"rope": 0, "window": 200}, {"activation": "gelu"}], heads=8, kv_heads=1)
    decoder = NativeDecoder(weights, cache=cache)
    ids = np.random.default_rng(0).integers(0, 50, 300).tolist()
    expected = decoder.whole(ids)[0]
    native.use_instruction_set(name)
    try:
        np.testing.assert_allclose(decoder.whole(ids)[0], expected, rtol=0, atol=0.05 if cache == "int8" else 0.02)
    finally:
        native.use_instruction_set(native.instruction_sets()[0])
