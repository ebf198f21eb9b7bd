#!/usr/bin/env bash
# The SuperLink: TLS, nodes known by their keys, its state in a file. In the folder with
# the certificates. It listens on this machine alone, since whoever reaches its port can
# register nodes and submit runs. Nodes elsewhere come through nodes.conf.
#   link.sh PORT
set -euo pipefail
umask 077 # link.db holds messages that are under way, uploads among them
# Flower reports its use to telemetry.flower.ai unless this is 0.
export FLWR_TELEMETRY_ENABLED=${FLWR_TELEMETRY_ENABLED:-0}
exec flower-superlink --host 127.0.0.1 --port "$1" \
	--ssl-ca-certfile ca.pem --ssl-certfile link.pem --ssl-keyfile link.key \
	--enable-supernode-auth --database "$PWD/link.db"
