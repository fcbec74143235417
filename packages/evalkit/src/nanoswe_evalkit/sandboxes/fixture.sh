# fixture.sh BWRAP IMAGE: an unpacked image of docker/fixture, in the network that it is started in; all it may do is
# to play that network, and all it sees is its own files.
exec "$1" --unshare-pid --unshare-ipc --die-with-parent \
  --cap-drop ALL --cap-add CAP_NET_ADMIN --cap-add CAP_NET_BIND_SERVICE \
  --ro-bind "$2/root" / --proc /proc --dev /dev --tmpfs /tmp -- bash /fixture/serve.sh
