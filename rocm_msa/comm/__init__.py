"""Memory that the ranks of one host share: runtime calls, agreement between ranks, mailboxes."""
