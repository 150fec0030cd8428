"""Task APIs: what an application wants done, in one call each."""
