"""Images and videos on their way into a prompt: read, sized and placed, without torch."""
