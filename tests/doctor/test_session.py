from __future__ import annotations

import pytest

from sae_tui.doctor.session import check_logout

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n"


@pytest.fixture
def systemd(sandbox):
    sandbox.file("run/systemd/system/.keep")
    return sandbox


def logind(sandbox, kill: str, only: str = "", exempt: str = "root") -> None:
    answer = f"KillUserProcesses={kill}\\nKillOnlyUsers={only}\\nKillExcludeUsers={exempt}\\n"
    sandbox.program("loginctl", f'[ "$1" = show-session ] && printf "{answer}"')


def level(sandbox, group: str, **environ: str) -> str:
    sandbox.file("proc/self/cgroup", group)
    (finding,) = check_logout(sandbox.box(**environ))
    assert bool(finding.remedy) == (finding.level != "ok")
    return finding.level


def test_without_systemd_logging_out_ends_no_processes(sandbox) -> None:
    assert level(sandbox, SESSION) == "ok"


def test_processes_that_logind_kills_at_logout_are_a_warning(systemd) -> None:
    logind(systemd, "yes")
    assert level(systemd, SESSION) == "warning"


def test_processes_that_logind_does_not_kill_at_logout_are_ok(systemd) -> None:
    logind(systemd, "no")
    assert level(systemd, SESSION) == "ok"


def test_processes_of_exempt_and_unlisted_users_survive_a_logout(systemd) -> None:
    logind(systemd, "yes")
    assert level(systemd, SESSION, USER="root") == "ok"
    logind(systemd, "yes", only="bob eve")
    assert level(systemd, SESSION) == "ok"
    logind(systemd, "yes", only="bob ada")
    assert level(systemd, SESSION) == "warning"


def test_with_linger_jobs_are_started_outside_the_session(systemd) -> None:
    logind(systemd, "yes")
    assert level(systemd, SESSION) == "warning"
    systemd.file("var/lib/systemd/linger/ada")
    assert level(systemd, SESSION) == "ok"


def test_without_linger_the_user_manager_ends_with_the_last_login(systemd) -> None:
    assert level(systemd, MANAGER) == "warning"
    systemd.file("var/lib/systemd/linger/ada")
    assert level(systemd, MANAGER) == "ok"


def test_a_service_or_container_belongs_to_no_session(systemd) -> None:
    assert level(systemd, "0::/system.slice/sshd.service\n") == "ok"


def test_an_unavailable_logind_is_a_note(systemd) -> None:
    assert level(systemd, SESSION) == "note"
