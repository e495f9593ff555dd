"""A program that tests/repository/suite/test_fork_server.py starts: does what its first argument names."""

import os
import signal
import subprocess
import sys

match sys.argv[1:]:
    case ["describe", descriptor]:
        os.write(int(descriptor), b"passed")
        print(os.getpid(), os.getppid(), os.getpgid(0), os.getcwd(), os.environ["GIVEN"], __name__, sys.path[0])
        print(sys.stdin.read(), file=sys.stderr)
    case ["exit", status]:
        sys.exit(int(status) if status.isdigit() else status)
    case ["fail"]:
        raise ValueError("it failed")
    case ["wait"]:
        print("ready", flush=True)
        sys.stdin.read()
    case ["signals"]:
        print({number.name: signal.getsignal(number) for number in signal.valid_signals() if number < signal.SIGRTMIN})
    case ["start"]:
        words = (sys.executable, "-P", __file__, "exit", "7")
        print(subprocess.run(words, check=False).returncode, "torch" in sys.modules)
