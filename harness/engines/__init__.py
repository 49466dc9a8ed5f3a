"""What `engine=` names: three engines that answer prompts, and the contract they share."""
