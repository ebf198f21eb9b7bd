#!/usr/bin/env bash
# A certificate authority of one's own, and the SuperLink's certificate, in FOLDER.
#   certificates.sh FOLDER [HOST]
# Nodes get ca.pem. ca.key makes certificates: keep it off the SuperLink's machine.
set -euo pipefail
folder=$1 host=${2:-localhost}
umask 077 # keys are in the folder
mkdir -p "$folder" && cd "$folder"
key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
openssl req -x509 "${key[@]}" -days 365 -subj "/CN=CA of $host" -keyout ca.key -out ca.pem
openssl req "${key[@]}" -subj "/CN=$host" -keyout link.key -out link.csr
openssl x509 -req -in link.csr -days 365 -CA ca.pem -CAkey ca.key -out link.pem \
	-extfile <(echo "subjectAltName=DNS:$host,DNS:localhost,IP:127.0.0.1")
rm link.csr
chmod 644 ca.pem # public, so that a node under any account can read its copy
