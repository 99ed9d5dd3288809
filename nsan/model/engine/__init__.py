"""The compiled heart of the driver model: a discrete-event simulation on flat arrays.

``state`` holds the arrays, ``queue`` the events in order of time, ``patterns`` says what a thread
block touches, ``residency`` where pages are and what moves them, ``thrashing`` the measures against
ping-pong, ``service`` the driver's answer to a batch, ``link`` what a GPU does with pages that
stay at the host, ``gpu`` and ``host`` the processors that fault, ``loop`` turns the crank.
"""
