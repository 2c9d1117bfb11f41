"""What several test modules share: tiny models, fakes, servers, files that other processes run."""
