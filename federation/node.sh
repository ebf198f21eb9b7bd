#!/usr/bin/env bash
# A SuperNode with data of its own. Call it in the folder with ca.pem and the node's key.
# Without DATA ("") it makes the key, and ends. Who runs the SuperLink registers the
# public half: flwr supernode register NAME.pub federation --name NAME
#   node.sh NAME DATA LINK_PORT OWN_PORT
set -euo pipefail
if [ -z "$2" ]; then
	[ -f "$1" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$1"
	exit 0
fi
for file in ca.pem "$1"; do
	[ -f "$file" ] && continue
	echo "node.sh: there is no $file in $PWD: call it in the folder with ca.pem and the key" >&2
	exit 1
done
# Several nodes on one machine would each take all of its cores. A node that has a machine
# of its own may: OMP_NUM_THREADS=$(nproc) node.sh ...
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Flower reports its use to telemetry.flower.ai unless this is 0.
export FLWR_TELEMETRY_ENABLED=${FLWR_TELEMETRY_ENABLED:-0}
# One that was killed is let in again when the SuperLink has noticed, within a minute.
until flower-supernode --superlink "127.0.0.1:$3" --root-certificates ca.pem \
	--auth-supernode-private-key "$1" --port "$4" --node-config "data-path='$2'"; do
	echo "node.sh: trying again in 10 s. If the node was refused: its key is not registered," \
		"or the SuperLink has not yet given up the former process" >&2
	sleep 10
done
