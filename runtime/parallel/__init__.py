"""What two ranks share: the mailbox (sums), the lockstep record (agreement) and the memory both stand in."""
