#!/bin/sh
# Run `make demo` and the tests of `flwr run` while the local SuperLink of another
# environment is alive, which has Flower but not this library. Flower leaves one behind
# after each `flwr run`, and it would start our runs in its own environment.
#
#     release/beside_another.sh FOLDER
#
# FOLDER holds the other environment, and the home that both share.
set -eu
cd "$(dirname "$0")/.."
folder=$1
mkdir -p "$folder/home"
export HOME="$folder/home"
test -d "$folder/env" || tools/environment.sh "$folder/env" python3 "flwr[simulation]>=1.28,<2"
end() { pkill -f "$folder/env/bin/.*flower-superlink" || true; }
trap end EXIT
# An app that does nothing, whose SuperLink stays.
mkdir -p "$folder/app"
cat >"$folder/app/pyproject.toml" <<'END'
[project]
name = "other"
version = "1.0.0"
[tool.flwr.app]
publisher = "other"
[tool.flwr.app.components]
serverapp = "nothing:server"
clientapp = "nothing:client"
END
cat >"$folder/app/nothing.py" <<'END'
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()
server.main()(lambda grid, context: None)
END
PATH="$folder/env/bin:$PATH" flwr run "$folder/app" --stream
pgrep -f "$folder/env/bin/.*flower-superlink" || {
	echo "The other environment's SuperLink does not run."
	exit 1
}
make demo
make install
.venv/bin/pytest tests/test_ray.py
