"""What an algorithm's rounds ask and make of the replies, where that fills a file."""
