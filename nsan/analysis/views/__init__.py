"""What views draw: binned, folded and shortened so that a browser never gets more than it can show."""
