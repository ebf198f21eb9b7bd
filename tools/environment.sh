#!/bin/sh
# Make a virtual environment, with a line every 15 seconds: pip says nothing for minutes
# while it unpacks PyTorch.
#
#     tools/environment.sh FOLDER PYTHON REQUIREMENT...
set -e
folder=$1 python=$2
shift 2
echo "Installing $* into $folder: some GB, most of them PyTorch, in a few minutes."
mkdir -p "$folder"
{ "$python" -m venv "$folder" && exec "$folder/bin/pip" install -q "$@"; } &
pip=$! seconds=0
trap 'kill $pip' INT TERM # what runs in the background would not see Ctrl+C
while kill -0 $pip 2>/dev/null; do
	sleep 1
	seconds=$((seconds + 1))
	[ $((seconds % 15)) != 0 ] || echo "  after $seconds s: $folder has $(du -sh "$folder" | cut -f1); pip downloads all before it unpacks"
done
wait $pip
touch "$folder/dependencies"
echo "Installed in $seconds s."
