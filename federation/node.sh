#!/usr/bin/env bash
# A SuperNode with data of its own. Its key is made once; who runs the SuperLink registers
# the public half: flwr supernode register NAME.pub federation --name NAME
#   node.sh NAME DATA LINK_PORT OWN_PORT
set -euo pipefail
[ -f "$1" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$1"
[ -n "$2" ] || exit 0 # the key alone
# One that was killed is let in again when the SuperLink has noticed, within a minute.
until flower-supernode --superlink "127.0.0.1:$3" --root-certificates ca.pem \
	--auth-supernode-private-key "$1" --port "$4" --node-config "data-path='$2'"; do
	sleep 10
done
