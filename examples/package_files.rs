//! Writes the files of a package that are made from the definitions of the options: manual pages, and completions for
//! bash, zsh and fish. `tools/package` calls this program.
//!
//! ```sh
//! cargo run --features package --example package_files -- DIRECTORY
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use clap_complete::Shell;

fn main() -> anyhow::Result<()> {
    let directory = std::env::args_os().nth(1).map(PathBuf::from);
    let directory = directory.ok_or_else(|| anyhow::anyhow!("usage: package_files DIRECTORY"))?;
    write_files(&directory)
}

/// Writes `man1/*.1`, `bash/NAME`, `zsh/_NAME` and `fish/NAME.fish` for each program.
fn write_files(directory: &Path) -> anyhow::Result<()> {
    let subdirectory = |name: &str| -> anyhow::Result<PathBuf> {
        let path = directory.join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    };
    for command in ringtrain::cli::definitions::command_definitions() {
        let name = command.get_name().to_owned();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let path = subdirectory(&shell.to_string())?;
            let written = clap_complete::generate_to(shell, &mut command.clone(), name.clone(), path)?;
            if shell == Shell::Bash {
                // The directory of bash-completion needs the name of the program.
                fs::rename(&written, written.with_file_name(&name))?;
            }
        }
        // Also writes a page for each command, for example ringtrain-predict(1).
        clap_mangen::generate_to(command, subdirectory("man1")?)?;
    }
    Ok(())
}
