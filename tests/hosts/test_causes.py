from __future__ import annotations

import pytest

from sae_tui.hosts.causes import no_connection, other_protocol

CHANGED = ["@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "Host key verification failed."]


@pytest.mark.parametrize(
    ("code", "complaints", "sentence"),
    [
        (255, CHANGED, "has a different host key than before: if you expect that, run ssh-keygen -R gpu1"),
        (255, ["Host key verification failed."], "is not known to ssh yet; run ssh me@gpu1 once and check its key"),
        (255, ["me@gpu1: Permission denied (publickey)."], "accepts none of your keys; make ssh me@gpu1 work without"),
        (255, ["ssh: Could not resolve hostname gpu1: Name or service not known"], "was not found; correct its name"),
        (255, ["ssh: connect to host gpu1 port 22: Connection refused"], "cannot be reached: ssh: connect to host"),
        (255, [], "cannot be reached: ssh printed no error"),
        (127, ["sh: 1: exec: sae-tui: not found"], "has no sae-tui on its PATH; install it there"),
        (
            2,
            ["sae-tui: error: COMMAND: invalid choice: 'stream' (choose from gpus)"],
            "that is too old; update sae-tui",
        ),
        (1, ["sae-tui: error: /x is not a folder"], "ended sae-tui: sae-tui: error: /x is not a folder"),
        (9, [], "ended sae-tui: exit code 9"),
        (-15, ["noise"], "cannot be reached: ssh was ended by SIGTERM"),
    ],
)
def test_each_kind_of_connection_failure_has_its_own_sentence(code, complaints, sentence) -> None:
    assert sentence in no_connection("me@gpu1", code, complaints).sentence


def test_the_message_says_which_host_to_update() -> None:
    assert other_protocol(1, "0.2.0", 2).sentence == "has sae-tui 0.2.0, which is too old; update it there"
    assert other_protocol(3, "9.0", 2).sentence == "has sae-tui 9.0, which is newer than the one here; update it here"
