"""From layer specs to one page layout. The door is `kvpage.planner.planner.plan`."""
