"""What differs between conditions, and whether more than runs of one condition differ anyway."""
