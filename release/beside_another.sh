#!/bin/sh
# Run `make demo` and the tests of `flwr run` while the local SuperLink of another
# environment is alive, which has Flower but not this library. Flower leaves one behind
# after each `flwr run`, and it would start our runs in its own environment.
#
#     release/beside_another.sh FOLDER
#
# FOLDER is made. It holds the other environment and the home that both share.
set -eu
cd "$(dirname "$0")/.."
folder=$1
mkdir "$folder" "$folder/home"
export HOME="$folder/home"
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "flwr[simulation]>=1.28,<2"
end() { pkill -f "$folder/env/bin/.*flower-superlink" || true; }
trap end EXIT
# The run fails, since the environment lacks the library; its SuperLink stays.
PATH="$folder/env/bin:$PATH" flwr run apps/fedfisher --stream || true
pgrep -f "$folder/env/bin/.*flower-superlink" || {
	echo "The other environment's SuperLink does not run."
	exit 1
}
make demo
make install
.venv/bin/pytest tests/test_ray.py
