//! The definitions of the options of all programs, from which the example `package_files` makes manual pages and completions.

use super::{bench, run, train};

/// Returns the definitions of the options of `ringrun`, `ringtrain` and `ringbench`.
pub fn command_definitions() -> [clap::Command; 3] {
    // The programs have no command `help`.
    [run::command(), train::command(), bench::command()].map(|command| command.disable_help_subcommand(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_accepts_the_definitions_with_their_commands() {
        let names = command_definitions().map(|mut command| {
            command.build();
            command.clone().debug_assert();
            let has_names = command.get_subcommands().all(|command| command.get_bin_name().is_some());
            assert!(has_names, "{}: without the names, the completions cannot be made", command.get_name());
            (command.get_name().to_owned(), command.get_subcommands().count() > 0)
        });
        let expected = [("ringrun", false), ("ringtrain", true), ("ringbench", true)];
        assert_eq!(names, expected.map(|(name, has_commands)| (name.to_owned(), has_commands)));
    }
}
