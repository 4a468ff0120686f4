"""Adds one line to Megatron-LM's training scripts, so that they know the --ssdtrain-* flags.

```
python patches/apply.py CHECKOUT            # finds the patch that fits, applies it, says which; exit status 1 if it could not
python patches/apply.py CHECKOUT --check    # is one applied, or would one fit? exit status 1 if not
python patches/apply.py CHECKOUT --reverse  # takes it out again
```

Versions of Megatron-LM whose scripts are alike share a patch. `python -m ssdtrain_megatron.run SCRIPT ...` needs none.
"""

import argparse
import subprocess
import sys
from pathlib import Path


def scripts(patch: Path) -> int:
    """How many scripts `patch` changes."""
    return sum(line.startswith("+++ ") for line in patch.read_text().splitlines())


# A patch of fewer scripts also fits (and is also seen as applied) where one of more does: that one comes first.
PATCHES = sorted(
    Path(__file__).parent.glob("megatron-lm-*.patch"),
    key=lambda patch: (scripts(patch), patch.name),
    reverse=True,
)


def fits(checkout: Path, patch: Path, *, reverse: bool) -> str | None:
    """None if `patch` can be applied (or taken out), else what git says against it."""
    return _git_apply(checkout, patch, "--check", *(["--reverse"] if reverse else []))


def _git_apply(checkout: Path, patch: Path, *options: str) -> str | None:
    # Outside of any repository's view: a checkout may be an exported tree below another repository.
    done = subprocess.run(
        ["git", "apply", *options, str(patch.resolve())],
        cwd=checkout,
        env={
            "PATH": "/usr/bin:/bin:/usr/local/bin",
            "GIT_CEILING_DIRECTORIES": str(checkout.resolve().parent),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr.strip() or f"git ended with {done.returncode}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="directory that holds pretrain_gpt.py")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="change nothing")
    choice.add_argument("--reverse", action="store_true", help="take the line out again")
    given = parser.parse_args(arguments)
    if not (given.checkout / "pretrain_gpt.py").is_file():
        print(f"{given.checkout} holds no pretrain_gpt.py: name a checkout of Megatron-LM")
        return 1

    applied = [patch for patch in PATCHES if fits(given.checkout, patch, reverse=True) is None]
    if given.reverse:
        if not applied:
            print(f"no patch is applied in {given.checkout}")
            return 1
        against = _git_apply(given.checkout, applied[0], "--reverse")
        return _ended(against, f"{applied[0].name} taken out of {given.checkout}")
    if applied:
        print(f"{applied[0].name} is applied in {given.checkout}")
        return 0

    reasons = {patch: fits(given.checkout, patch, reverse=False) for patch in PATCHES}
    fitting = [patch for patch, reason in reasons.items() if reason is None]
    if not fitting:
        print(f"no patch fits {given.checkout}; use python -m ssdtrain_megatron.run, which needs none")
        for patch, reason in reasons.items():
            print(f"  {patch.name}: {reason}")
        return 1
    if given.check:
        print(f"{fitting[0].name} fits {given.checkout}, and is not applied")
        return 0
    against = _git_apply(given.checkout, fitting[0])
    return _ended(against, f"{fitting[0].name} applied in {given.checkout}")


def _ended(against: str | None, done: str) -> int:
    """The exit status: 1 where git has something `against` it, though the patch fits (a directory that cannot be written)."""
    print(done if against is None else f"not {done}: {against}")
    return 0 if against is None else 1


if __name__ == "__main__":
    sys.exit(main())
