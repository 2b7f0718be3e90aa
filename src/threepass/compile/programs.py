"""The captured programs of one model: found by their signature, captured, counted, and replaced when there are many.

A signature is the state of the model and the loss, the kind of step (options, which terms), and the inputs (shapes,
dtypes, Python values). All decisions are made by counts, never by times, so that runs can be repeated:

* The first program of a state and kind is captured at once.
* Other inputs of the same state and kind run eagerly at their first call and are captured at their second, so that a
  last, smaller batch that comes once does not cost a compilation.
* If such inputs differ in nothing but sizes, the second call with sizes that have no program captures one that is
  dynamic in the dimensions that were seen to differ (`dynamic.py`). It serves all sizes for which its guards hold.
  Where there can be no such program, each size gets a program of its own at its second call.
* On a GPU a dynamic program runs without a CUDA graph, and there is none for a step that has kernels of our own
  (`step.py`).
* At most `max_programs` are kept. A further one replaces the least recently used, once it was called more often than
  that was used since the model last changed.
* If the state keeps changing, so that programs are captured and never used again, new states are treated as new inputs
  are.

What is captured, put off and replaced is logged (`logging.getLogger("threepass")`, level INFO); where steps stay eager,
there is one warning, or with `compile="require"` a `CaptureError`.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from ..errors import CaptureError, reason_of, warn_uncompiled
from .dynamic import Dimensions
from .signature import Signature, State, UnsettledError
from .sizes import MAX_DYNAMIC, Family, Sizes

MAX_PROGRAMS = 16
ATTEMPTS = 3  # captures that fail, or whose programs are used once, before no more are tried
COMPILE = (False, True, "trace", "require")
_LOCK = threading.RLock()  # tracing sets switches of the whole process: two threads do not trace at the same time
log = logging.getLogger("threepass")


class Program(Protocol):
    @property
    def check_seconds(self) -> float: ...
    @property
    def graph_bytes(self) -> int | None: ...


P = TypeVar("P", bound=Program)
R = TypeVar("R")


class Key(NamedTuple):
    """inputs: their signature; for a dynamic program and a family, without sizes."""

    state: State
    kind: Hashable
    inputs: Hashable


@dataclass
class Entry(Generic[P]):
    """A signature of a call: how often it came, and its program if there is one."""

    key: Key
    label: str
    calls: int = 0  # that ran eagerly, or captured it
    uses: int = 0
    uses_since_change: int = 0  # of any model state that had no program before
    seconds: float = 0.0
    program: P | None = None
    failed: bool = False


def check_compile(value: Any) -> None:
    if not any(value is known or (isinstance(value, str) and value == known) for known in COMPILE):
        raise ValueError(f'compile must be False, True, "trace" or "require", got {value!r}')


class Programs(Generic[P]):
    """Finds or captures the program of a call.

    Attributes:
        compile: the user's option: True, "trace" or "require".
        max_programs: how many are kept; may be set at any time.
        announce: told what is about to be captured.
        seconds: spent on captures, those that failed included; `check_seconds`, of them on checks of programs.
    """

    def __init__(self, signature: Signature, compile: bool | str = True, max_programs: int = MAX_PROGRAMS):
        self.signature, self.compile, self.max_programs = signature, compile, max_programs
        self._entries: OrderedDict[Key, Entry[P]] = OrderedDict()  # the most recently used last
        self._families: OrderedDict[Key, Family[P]] = OrderedDict()  # likewise
        self._newest: Entry[P] | None = None
        self._wasted = self._failed = self._unsettled = 0  # attempts, in a row
        self._warned: set[str] = set()
        self._due: CaptureError | None = None
        self._failing: Entry[P] | None = None  # whose capture failed in this call
        self.announce: Callable[[str], None] = lambda text: None
        self.seconds = self.check_seconds = 0.0

    @property
    def required(self) -> bool:
        """Whether a step that has no program is an error."""
        return self.compile == "require"

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[P]:
        return (entry.program for entry in self.entries if entry.program is not None)

    @property
    def entries(self) -> list[Entry[P]]:
        """Of the programs, the least recently used first."""
        return [entry for entry in self._entries.values() if entry.program is not None]

    @property
    def graph_bytes(self) -> int | None:
        """The memory of all CUDA graphs; None where there are none."""
        each = [program.graph_bytes for program in self]
        return sum(b for b in each if b is not None) if any(b is not None for b in each) else None

    def reset(self) -> None:
        """Discards everything, so that each signature is captured again."""
        self._entries.clear()
        self._families.clear()
        self._newest, self._due = None, None
        self._wasted = self._failed = self._unsettled = 0
        self._warned.clear()

    def find(
        self,
        kind: Hashable,
        inputs: Hashable,
        make: Callable[[], P],
        label: Callable[[], str],
        recurring: bool = False,
        sizes: Callable[[], Sizes[P]] | None = None,
    ) -> P | None:
        """The program of a call, made now if it is time for that; None: this call runs eagerly, by `eagerly`.

        recurring: these inputs are known to come again, so that they are captured at their first call. sizes: of the
        call, where its program may be dynamic.
        """
        with _LOCK:
            self._failing = None
            try:
                key = Key(self.signature.state(), kind, inputs)
            except CaptureError as error:
                self.refuse(error)
                return None
            entry = self._entry_for(key, make, label, recurring, sizes)
            return entry.program

    def _entry_for(
        self,
        key: Key,
        make: Callable[[], P],
        label: Callable[[], str],
        recurring: bool,
        sizes: Callable[[], Sizes[P]] | None,
    ) -> Entry[P]:
        """The entry of a call, whose program is made now if it is time for that."""
        entry = self._entries.get(key)
        if sizes is not None and (entry is None or entry.program is None):
            dynamic = self._dynamic(key, sizes())
            key, entry = (key, entry) if dynamic is None else (dynamic.key, dynamic)
        if entry is None:
            entry = self._new_entry(key, label())
        self._entries.move_to_end(key)
        if entry.program is None:
            entry.calls += 1
            if not self._should_capture(entry, recurring):
                return entry
            self._capture(entry, make)
        if entry.program is not None:
            entry.uses += 1
            entry.uses_since_change += 1
        return entry

    def _dynamic(self, key: Key, sizes: Sizes[P]) -> Entry[P] | None:
        """The entry of the dynamic program for a call whose sizes have no program, captured now if it is time."""
        family = self._family(key._replace(inputs=sizes.layout), sizes)
        for entry in [e for e in family.dynamic if e.program is not None]:
            try:
                if sizes.serves(entry.program):
                    return entry
            except CaptureError as error:  # found when it was checked with these sizes
                self._drop(entry)
                self._stay_static(family, sizes, error)
        varying = family.symbols_for(sizes.shapes)
        alike = any(e.key[:2] == key[:2] for e in self.entries)
        if family.is_static or not varying or not alike:
            return None
        family.put_off += 1
        if family.put_off == 1:
            return None
        if family.captures == MAX_DYNAMIC:
            self._stay_static(family, sizes, CaptureError(f"guards of {MAX_DYNAMIC} dynamic programs failed"))
            return None
        return self._capture_dynamic(key, family, sizes, varying)

    def _family(self, key: Key, sizes: Sizes[P]) -> Family[P]:
        family = self._families.setdefault(key, Family(sizes.shapes))
        family.add(sizes.shapes)
        self._families.move_to_end(key)
        if len(self._families) > 8 * self.max_programs:
            _, oldest = self._families.popitem(last=False)
            for entry in [e for e in oldest.dynamic if e.program is not None]:
                self._drop(entry)
        return family

    def _capture_dynamic(self, key: Key, family: Family[P], sizes: Sizes[P], varying: Dimensions) -> Entry[P] | None:
        inputs = (sizes.layout, varying, family.captures)
        entry: Entry[P] = Entry(key._replace(inputs=inputs), sizes.label(varying), family.put_off)
        if not self._has_room(entry):
            return None
        family.captures += 1
        began = self._begin(entry)
        try:
            program = sizes.make(varying)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._stay_static(family, sizes, error)
            return None
        finally:
            self.seconds += time.perf_counter() - began
        self._entries[entry.key] = entry
        family.dynamic.append(entry)
        family.put_off = 0
        self._finish(entry, program, time.perf_counter() - began)
        return entry

    def _stay_static(self, family: Family[P], sizes: Sizes[P], error: Exception) -> None:
        family.is_static = True
        words = sizes.label(frozenset(family.varying))
        log.info("a separate program is captured for each size of %s, because %s", words, reason_of(error))

    def _new_entry(self, key: Key, label: str) -> Entry[P]:
        waiting = [k for k, entry in self._entries.items() if entry.program is None]
        if len(waiting) > 8 * self.max_programs:  # many inputs that came once
            del self._entries[waiting[0]]
        self._entries[key] = Entry(key, label)
        return self._entries[key]

    def _should_capture(self, entry: Entry[P], recurring: bool) -> bool:
        """Whether a signature without a program is to be captured at this call."""
        alike = [e for e in self._entries.values() if e.key[:2] == entry.key[:2] and e is not entry]
        if not self.required and (entry.failed or self._has_failed(entry, alike)):
            return False
        if entry.calls == 1 and any(e.program is not None for e in alike) and not recurring:
            log.info("new inputs, %s: this step runs eagerly, and is captured if they come again", entry.label)
            return False
        if entry.calls == 1 and self._wasted >= ATTEMPTS and not any(e.program is not None for e in alike):
            self._warn_of_changing_state(entry)
            return False
        return self._has_room(entry)

    def _has_failed(self, entry: Entry[P], alike: list[Entry[P]]) -> bool:
        """Whether so many captures have failed that this one is not tried; required programs always are."""
        at_each_state = entry.calls == 1 and self._failed >= ATTEMPTS
        return at_each_state or self._unsettled >= ATTEMPTS or sum(e.failed for e in alike) >= ATTEMPTS

    def _warn_of_changing_state(self, entry: Entry[P]) -> None:
        assert self._newest is not None
        changed = self._newest.key.state.difference(entry.key.state)
        log.info("the model or the loss changed again, %s: this step runs eagerly", changed)
        self.refuse(
            CaptureError(
                f"the model or the loss keeps changing between calls: {changed}. Every new value would have to be "
                "captured again. Keep values that change in a buffer and write to it in place"
            ),
            "changing",
        )

    def _has_room(self, entry: Entry[P]) -> bool:
        """Makes room for a program, if it may take another one's place."""
        captured = self.entries
        if not any(e.key.state == entry.key.state for e in captured):
            for other in captured:
                other.uses_since_change = 0
        while len(captured) >= self.max_programs:
            oldest = captured.pop(0)
            if entry.calls <= oldest.uses_since_change:
                self.refuse(
                    CaptureError(
                        f"the maximum of {self.max_programs} programs (one per signature of shapes, dtypes and Python "
                        "values) is captured already. Another signature runs eagerly until it has been called more "
                        "often than the least recently used program. Pad or bucket the inputs to a few lengths, drop "
                        "the last smaller batch (drop_last=True in DataLoader), or set step.compiled.max_programs "
                        "higher"
                    ),
                    "full",
                )
                return False
            log.info("discarded the program for %s, used %d times, to capture another", oldest.label, oldest.uses)
            self._drop(oldest)
        return True

    def _drop(self, entry: Entry[P]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # its graph may still be running
        del self._entries[entry.key]
        entry.program = None

    def _begin(self, entry: Entry[P]) -> float:
        """Announces a capture, and gives the time."""
        self.announce(f"compiling {entry.label}")
        return time.perf_counter()

    def _capture(self, entry: Entry[P], make: Callable[[], P]) -> None:
        began = self._begin(entry)
        try:
            program = make()
        except torch.OutOfMemoryError:
            raise
        except UnsettledError as error:
            self._unsettled += 1
            if self._unsettled >= ATTEMPTS:
                self.refuse(error)
            log.info("this step runs eagerly, and the next call tries to capture it again: %s", error)
        except Exception as error:
            entry.failed = True
            self._failed += 1
            self._failing = entry
            self.refuse(error)
        else:
            self._finish(entry, program, time.perf_counter() - began)
        finally:
            self.seconds += time.perf_counter() - began

    def _finish(self, entry: Entry[P], program: P, seconds: float) -> None:
        """Counts and logs a program that was captured."""
        entry.program, entry.seconds = program, seconds
        self.check_seconds += program.check_seconds
        self._count_waste(entry)
        self._failed = self._unsettled = 0
        self._update_key(entry)
        check = f", {program.check_seconds:.1f} s of them to check it" if program.check_seconds else ""
        place = f"program {len(self)} of at most {self.max_programs}"
        log.info("captured %s in %.1f s%s (%s)", entry.label, seconds, check, place)

    def _count_waste(self, entry: Entry[P]) -> None:
        before, self._newest = self._newest, entry
        if before is not None:
            wasted = before.uses == 1 and before.key.state != entry.key.state
            self._wasted = self._wasted + 1 if wasted else 0

    def _update_key(self, entry: Entry[P]) -> None:
        """Takes the state after the capture, without attributes that the step overwrites and does not read."""
        key = entry.key._replace(state=self.signature.state())
        if key != entry.key and not set(key.state.items) >= set(entry.key.state.items):
            del self._entries[entry.key]
            for known in [known for known in self._families if known[:2] == entry.key[:2]]:
                self._families[known._replace(state=key.state)] = self._families.pop(known)
            entry.key = key
            self._entries[key] = entry

    def refuse(self, error: Exception, subject: str = "capture") -> None:
        """Keeps the reason why a step runs eagerly for `eagerly` to warn of, once per subject; raises if required."""
        if isinstance(error, CaptureError):
            reason = error
        else:
            reason = CaptureError(f"capturing it failed with {reason_of(error)}")
        if self.required:
            raise CaptureError(
                f'compile="require": this step cannot run as a captured program, because {reason_of(reason)}. '
                "With compile=True it runs eagerly, with the same results",
                reason.step_seconds,
            ) from error
        if subject not in self._warned:
            self._warned.add(subject)
            self._due = reason

    def eagerly(self, step: Callable[[], R], device: torch.device) -> R:
        """Runs a step that has no program; measures it and warns, if a warning is due."""
        due, self._due = self._due, None
        if due is not None:
            _wait_for(device)
        began = time.perf_counter()
        try:
            result = step()
        except Exception:
            self._forget_failure(due)
            raise
        if due is not None:
            _wait_for(device)
            warn_uncompiled(due, time.perf_counter() - began, self.compile)
        return result

    def _forget_failure(self, due: CaptureError | None) -> None:
        """The eager step failed too, at a label that is out of range, say: the next call is captured as if new."""
        entry, self._failing = self._failing, None
        if entry is None:
            return
        entry.failed = False
        self._failed -= 1
        if due is not None:
            self._warned.discard("capture")

    def report(self) -> str:
        """A line for each program: how often it was used, what capturing it took, and for which inputs it is."""
        waiting = len(self._entries) - len(self)
        lines = [f"{len(self)} of at most {self.max_programs} programs; {waiting} other signatures ran eagerly"]
        lines += [f"{e.uses:8d} uses  {e.seconds:6.1f} s  {e.label}" for e in self.entries]
        return "\n".join(lines)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
