"""Pictures on their way into a prompt: hostile bytes to pixels, pixels to patches, patches to places in the prompt."""
