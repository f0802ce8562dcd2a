"""The admin socket and the client of both sockets."""
