"""What was where, page by page: residency, refaults, ping-pong, room, working sets."""
